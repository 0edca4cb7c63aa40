"""vLLM's engine arguments that load the connector and the worker by configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.engines import model_files
from cacheblend_rag.engines.vllm.memory import cpu_kv_memory
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.prompt import chosen_header_ids
from cacheblend_rag.store.kv import ModelFingerprint

# Tokens and sequences of an engine step on a GPU: what vLLM's server takes on a large one. Its Python API takes 2048 and 128,
# which would cut a blend of 3,072 tokens into five segments instead of two.
_STEP_TOKENS, _STEP_SEQUENCES = 8192, 1024
# What makes a blend impossible or wrong if a user overrides it.
_OURS = {"kv_transfer_config", "worker_cls", "worker-cls"}


@dataclass(frozen=True)
class Launch:
    """How to start vLLM for one model.

    Attributes:
        arguments: For ``AsyncEngineArgs`` or the server's namespace.
        directory: The model's files.
        tokenizer: The model's, or None where there is none.
        fingerprint: The model's identity in store keys.
        header_ids: Tokens that chunks are precomputed behind.
        store: Directory, or addresses, of the store that all processes share.
    """

    arguments: dict[str, Any]
    directory: Path
    tokenizer: Any
    fingerprint: ModelFingerprint
    header_ids: tuple[int, ...]
    store: Path | str


def prepare(
    model: str | Path | None,
    store: Path | str,
    *,
    header: str | Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    ram_budget: int | None = None,
    disk_budget: int | None = None,
    step_tokens: int | None = None,
    **vllm_arguments: Any,
) -> Launch:
    """Work out what vLLM and the connector need to know.

    Args:
        model: A directory, a hub name, or None for the bundled model.
        store: Directory of the store, or addresses of tiers.
        header: What stands before the first chunk: rendered text, or token ids. None takes :func:`rag_header`'s.
        dtype: None takes fp32 on a CPU, the model's own elsewhere.
        ram_budget: Bytes of KV each worker holds in RAM in front of the disk.
        disk_budget: Bytes of KV on disk.
        step_tokens: Tokens of blending that one engine step takes while other requests stream; None takes what one step
            of chunked prefill takes.
        vllm_arguments: Any other engine argument of vLLM.

    Raises:
        InputError: An argument is one that the connector sets itself.
        ModelError: The model cannot be found.
    """
    from vllm.platforms import current_platform

    if taken := _OURS & vllm_arguments.keys():
        raise InputError(f"{', '.join(sorted(taken))} is set by cacheblend-rag itself; leave it out.")
    name = model_files.BUNDLED_MODEL if model_files.is_bundled(model) else str(model)
    directory, config = _find(model, name)
    chosen = _dtype(dtype, config)
    fingerprint = ModelFingerprint.from_directory(directory, chosen, name)
    tokenizer = (
        None if vllm_arguments.get("skip_tokenizer_init") else _tokenizer(vllm_arguments.get("tokenizer") or directory)
    )
    ids = chosen_header_ids(tokenizer, header)
    arguments = {
        # A hub model's files are taken from where the fingerprint was read.
        "model": str(directory),
        "dtype": str(chosen).removeprefix("torch."),
        "worker_cls": "cacheblend_rag.engines.vllm.worker.BlendWorker",
        "kv_transfer_config": _connect(
            store=str(store),
            fingerprint=fingerprint.digest,
            header_ids=list(ids),
            ram_budget=ram_budget,
            disk_budget=disk_budget,
            step_tokens=step_tokens,
        ),
        "served_model_name": name,
        # Guided JSON in which a small model may put blanks for ever is no use.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **({} if current_platform.is_cpu() else step_size(vllm_arguments)),
        **vllm_arguments,
    }
    if current_platform.is_cpu() and (reserved := cpu_kv_memory(directory, chosen, vllm_arguments)) is not None:
        arguments["kv_cache_memory_bytes"] = reserved
    return Launch(arguments, directory, tokenizer, fingerprint, ids, store)


def step_size(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of an engine step on a GPU, as far as vLLM's arguments ``given`` leave it open."""
    tokens = given.get("max_num_batched_tokens")
    chosen: dict[str, Any] = {}
    if (
        tokens is None and given.get("enable_chunked_prefill") is not False
    ):  # without chunks a step must hold a whole prompt
        tokens = chosen["max_num_batched_tokens"] = _STEP_TOKENS
    if given.get("max_num_seqs") is None:
        chosen["max_num_seqs"] = min(_STEP_SEQUENCES, tokens or _STEP_SEQUENCES)
    return chosen


def _find(model: str | Path | None, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the directory of a model's files and its configuration."""
    try:
        directory = model_files.model_directory(model)
        return directory, json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load the model {name!r}: {error}") from error


def _connect(**extra: Any) -> dict[str, Any]:
    """Return vLLM's transfer configuration that loads the connector and hands it ``extra``."""
    return {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "cacheblend_rag.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _dtype(given: str | torch.dtype | None, config: dict[str, Any]) -> torch.dtype:
    from vllm.platforms import current_platform

    if isinstance(given, torch.dtype):
        return given
    if given in {None, "auto"}:
        # As the transformers engine chooses, so that both read the same stores.
        stated = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        given = "float32" if current_platform.is_cpu() else str(stated)
    found = getattr(torch, {"half": "float16", "float": "float32"}.get(str(given), str(given)), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype {given!r} is unknown; give float32, bfloat16 or float16.")
    return found


def load_tokenizer(model: str | Path | None) -> Any:
    """Return the tokenizer of a model; see :func:`prepare`.

    Raises:
        ModelError: The model cannot be found, or has none.
    """
    return _tokenizer(_find(model, str(model))[0])


def _tokenizer(where: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load a tokenizer from {where}: {error}") from error
