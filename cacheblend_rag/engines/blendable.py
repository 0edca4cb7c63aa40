"""Which models can be blended at all, judged by their config; the parity gate has the last word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Frequencies that change with the prompt's length: stored keys cannot be moved by one rotation.
_LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}


def why_not_blendable(config: Any) -> str | None:
    """Return why a model with this (text) config cannot be blended, in words for a user; None if nothing speaks against it."""
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
    """Return the length up to which a prompt can be blended by a model with this (text) config; None if any can.

    Chunked-local attention (Llama-4) cuts a prompt at fixed positions: a token sees those of its piece alone. Stored KV
    was computed without such a cut, which is right in the first piece only.
    """
    size = getattr(config, "attention_chunk_size", None)
    return None if size is None else int(size)


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
