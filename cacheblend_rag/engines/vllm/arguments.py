"""Computes vLLM's engine arguments, which load the connector and the worker and limit memory and step size."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from cacheblend_rag.blending.profile import ModelProfile, load_profile
from cacheblend_rag.engines.models import BUNDLED_MODEL, dtype_named, is_bundled, model_directory, writer_of
from cacheblend_rag.engines.precision import check_memory, cpu_dtype
from cacheblend_rag.engines.vllm.starting import keep_what_is_compiled
from cacheblend_rag.engines.writer import KVWriter
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.prompt import Header, chosen_header_ids
from cacheblend_rag.store.identity import dtype_name
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

# Tokens and sequences of an engine step on a GPU: the defaults of vLLM's server on a large GPU. vLLM's Python API
# defaults to 2048 and 128, which would cut a blend of 3,072 tokens into five segments instead of two.
_STEP_TOKENS, _STEP_SEQUENCES = 8192, 1024
# Arguments that make a blend impossible or wrong if a user overrides them.
_OURS = {"kv_transfer_config", "kv_offloading_size", "worker_cls", "worker-cls"}
# On a CPU vLLM's paged cache takes 92% of all memory by default, and vLLM does not start if less is free. This package
# reserves room for _CONTEXTS prompts of full length, but at most a share of the free memory: weights and activations
# need the rest.
_CONTEXTS: Final = 4
_SHARE: Final = 0.5
_LEAST: Final = 64 << 20
# Arguments that make vLLM compute different KV from the same files, so that the KV belongs to another model.
ALTERING: Final = ("hf_overrides", "hf_config_path", "disable_sliding_window", "quantization", "quantization_config")
_CHOSEN_BY: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


@dataclass(frozen=True)
class Launch:
    """Holds everything needed to start vLLM for one model.

    Attributes:
        arguments: Arguments for ``AsyncEngineArgs`` or for the server's argument namespace.
        directory: Directory of the model's files.
        tokenizer: The model's tokenizer; None if there is none.
        fingerprint: Identity of the model in store keys.
        header_ids: Tokens that chunks are precomputed behind.
        store: Directory or addresses of the store that all processes share.
        profile: Profile with the blend options that a request leaves open.
        writer: KV writer that computes the KV of chunks; None if the model itself does.
        lead: Tokens in front of answers (:func:`turn_lead`); None for the tokens that the tokenizer's chat template
            writes.
    """

    arguments: dict[str, Any]
    directory: Path
    tokenizer: Any
    fingerprint: ModelFingerprint
    header_ids: tuple[int, ...]
    store: Path | str
    profile: ModelProfile
    writer: WrittenBy | None = None
    lead: tuple[int, ...] | None = None


def prepare(
    model: str | Path | None,
    store: Path | str,
    *,
    header: Header | None = None,
    ratio: float | None = None,
    dtype: str | torch.dtype | None = None,
    ram_budget: int | None = None,
    disk_budget: int | None = None,
    step_tokens: int | None = None,
    writer: str | Path | None = None,
    **vllm_arguments: Any,
) -> Launch:
    """Return the arguments for vLLM and the connector, and everything else needed to start vLLM.

    The parameters are the parameters of :class:`VLLMEngine` and ``step_tokens``: the number of prefill tokens whose
    time blends may take in one engine step while other requests stream. None takes one step of chunked prefill.

    Raises:
        InputError: An argument is one that the connector sets itself, the KV writer was made for another model, or the
            ratio is out of range.
        ModelError: The model or its tokenizer cannot be loaded.
    """
    if taken := _OURS & vllm_arguments.keys():
        raise InputError(f"{', '.join(sorted(taken))} is set by cacheblend-rag itself; leave it out.")
    name = BUNDLED_MODEL if is_bundled(model) else str(model)
    directory, config = _find(model, name, vllm_arguments)
    chosen = _dtype(dtype, config)
    if not (config.get("quantization_config") or vllm_arguments.get("quantization")):
        _check_memory(directory, config, chosen)
    fingerprint = ModelFingerprint.from_directory(directory, chosen, name)
    tokenizer = None if vllm_arguments.get("skip_tokenizer_init") else _tokenizer(directory, vllm_arguments)
    by = writer_of(model, writer)
    written_by = None if by is None else KVWriter.read(by, fingerprint, directory).name
    profile = load_profile(fingerprint.digest, directory, ratio, written_by)
    fingerprint = _as_run(fingerprint, directory, config, vllm_arguments)
    ids = chosen_header_ids(tokenizer, header, profile.blockwise)
    arguments = {
        # vLLM loads a hub model from the directory whose files gave the fingerprint.
        "model": str(directory),
        "dtype": dtype_name(chosen),
        "worker_cls": "cacheblend_rag.engines.vllm.worker.BlendWorker",
        "kv_transfer_config": _connect(
            store=str(store),
            fingerprint=fingerprint.digest,
            header_ids=list(ids),
            ram_budget=ram_budget,
            disk_budget=disk_budget,
            step_tokens=step_tokens,
            writer=written_by and asdict(written_by),
        ),
        "served_model_name": name,
        # With whitespace allowed, a small model may write blanks into guided JSON for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **vllm_arguments,
        **_sizes_here(directory, chosen, vllm_arguments),
    }
    return Launch(arguments, directory, tokenizer, fingerprint, ids, store, profile, written_by)


def _as_run(
    fingerprint: ModelFingerprint, directory: Path, config: Mapping[str, Any], given: Mapping[str, Any]
) -> ModelFingerprint:
    """Return the model's fingerprint, with a different digest if the arguments ``given`` alter the KV (`ALTERING`)."""
    altered = {name: given[name] for name in ALTERING if given.get(name)}
    if config.get("quantization_config"):  # naming the method of quantised files changes nothing
        altered.pop("quantization", None)
    if callable(override := altered.get("hf_overrides")):
        from transformers import AutoConfig

        altered["hf_overrides"] = override(AutoConfig.from_pretrained(directory)).to_dict()
    if not altered:
        return fingerprint
    text = json.dumps([fingerprint.digest, altered], sort_keys=True, default=str)
    return replace(fingerprint, digest=hashlib.sha256(text.encode()).hexdigest()[: len(fingerprint.digest)])


def _sizes_here(directory: Path, dtype: torch.dtype, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine-dependent arguments that ``given`` leaves open; on a CPU, also reuse compiled graphs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return step_size(given)
    keep_what_is_compiled()
    reserved = _cpu_kv_memory(directory, dtype, given)
    return {} if reserved is None else {"kv_cache_memory_bytes": reserved}


def step_size(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits on tokens and sequences of an engine step on a GPU, except for limits that ``given`` sets."""
    tokens = given.get("max_num_batched_tokens")
    chosen: dict[str, Any] = {}
    # Without chunked prefill a step must hold a whole prompt.
    if tokens is None and given.get("enable_chunked_prefill") is not False:
        tokens = chosen["max_num_batched_tokens"] = _STEP_TOKENS
    if given.get("max_num_seqs") is None:
        chosen["max_num_seqs"] = min(_STEP_SEQUENCES, tokens or _STEP_SEQUENCES)
    return chosen


def _cpu_kv_memory(directory: Path, dtype: torch.dtype, arguments: Mapping[str, Any]) -> int | None:
    """Return the bytes to reserve for the KV cache: four full-length prompts, but at most half of the free memory.

    Return None if the user has set the size, by an argument or by ``VLLM_CPU_KVCACHE_SPACE``, and for models without
    attention.
    """
    if any(arguments.get(name) is not None for name in _CHOSEN_BY) or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory).get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0))
    if not heads:
        return None
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    token = 2 * int(config.num_hidden_layers) * kv_heads * head_dim * dtype.itemsize
    context = int(arguments.get("max_model_len") or config.max_position_embeddings)
    room = int(_SHARE * psutil.virtual_memory().available)
    return max(_LEAST, min(_CONTEXTS * context * token, room))


def _find(model: str | Path | None, name: str, given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the directory of a model's files, found by vLLM's arguments ``given``, and the model's configuration."""
    try:
        directory = model_directory(model, revision=given.get("revision"), cache_dir=given.get("download_dir"))
        return directory, json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load the model {name!r}: {error}") from error


def _connect(**extra: Any) -> dict[str, Any]:
    """Return vLLM's transfer configuration, which loads the connector and passes ``extra`` to the connector."""
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "cacheblend_rag.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "starter": os.getpid()},
    }


def _dtype(given: str | torch.dtype | None, config: dict[str, Any]) -> torch.dtype:
    from vllm.platforms import current_platform

    if isinstance(given, torch.dtype):
        return given
    if given in {None, "auto"}:
        # The transformers engine chooses the same dtype, so that both engines read the same stores.
        if current_platform.is_cpu():
            return cpu_dtype(config)
        return _own_dtype(config)
    return dtype_named(str(given))


def _own_dtype(config: dict[str, Any]) -> torch.dtype:
    return dtype_named(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))


def _check_memory(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Check on a CPU that the model fits; vLLM itself checks the memory of a GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        check_memory(directory, _own_dtype(config), dtype, torch.device("cpu"))


def _tokenizer(directory: Path, given: Mapping[str, Any]) -> Any:
    """Return the tokenizer that vLLM uses: the tokenizer that vLLM's arguments ``given`` name, else the model's own."""
    from transformers import AutoTokenizer

    where = given.get("tokenizer") or directory
    try:
        return AutoTokenizer.from_pretrained(where, revision=given.get("tokenizer_revision") or given.get("revision"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load a tokenizer from {where}: {error}") from error
