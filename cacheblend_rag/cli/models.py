"""Runs `cacheblend models`."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.console import options
from cacheblend_rag.console.known_models import KNOWN_MODELS, DType, KnownModel, machine
from cacheblend_rag.console.output import echo, print_json, size, table


def models(as_json: options.AsJSON = False) -> None:
    """List models to start with: their sizes, whether they fit this machine, and which need no model hub."""
    memory, dtype, where = machine()
    if as_json:
        print_json([_facts(each, memory, dtype) for each in KNOWN_MODELS])
        return
    rows = [["--model", "disk", "RAM float32", "RAM bfloat16", f"KV a token, {dtype}", "fits here", "comes from"]]
    for each in KNOWN_MODELS:
        kept = f"{each.kv(dtype) / 1024:.0f} KiB"
        small, large = size(each.weights("bfloat16")), size(each.weights("float32"))
        rows.append([each.name, small, large, small, kept, _fits(each, memory, dtype), _source(each)])
    echo(table(rows))
    echo()
    for each in KNOWN_MODELS:
        if each.purpose:
            echo(f"{each.name}: {each.purpose}.")
    echo(
        f"This machine: {size(memory)} of {where} memory, where a model runs in {dtype}. Larger models read better, and slower.\n"
        "No hub is needed for a directory with a Hugging Face model (--model DIR), nor for a GGUF file (--model FILE.gguf, with "
        "pip install 'cacheblend-rag[gguf]'), whose weights are kept once more, in bfloat16.\n"
        "Any other causal language model of the hub can be named, too. Documents are indexed with the model that answers."
    )


def _fits(model: KnownModel, memory: int, dtype: DType) -> str:
    if model.fits(memory, dtype):
        return "yes"
    return "with --dtype bfloat16" if model.fits(memory, "bfloat16") else "no"


def _source(model: KnownModel) -> str:
    return f"{model.source} (on this machine)" if model.from_hub and _downloaded(model) else model.source


def _downloaded(model: KnownModel) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model.name, "config.json"), str)


def _facts(model: KnownModel, memory: int, dtype: DType) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": model.parameters,
        "disk_bytes": model.weights("bfloat16"),
        "ram_bytes": {"float32": model.weights("float32"), "bfloat16": model.weights("bfloat16")},
        "kv_bytes_per_token": {"float32": model.kv("float32"), "bfloat16": model.kv("bfloat16")},
        "dtype_here": dtype,
        "fits": model.fits(memory, dtype),
        "needs_hub": model.from_hub and not _downloaded(model),
        "source": model.source,
        "purpose": model.purpose,
    }
