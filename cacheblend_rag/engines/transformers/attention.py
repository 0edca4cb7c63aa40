"""SDPA for scattered queries on a CPU: in blocks of rows that read only the keys they may see.

Registered with transformers as an attention implementation; outside a scattered pass it is transformers' own SDPA. The mask
is the same either way, so results agree to the last bits; blocks only skip keys that the mask would hide from all of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "cacheblend_sdpa"

# Rows per block: measured best between 32 and 512 on a CPU (benchmarks/attention_blocks.py).
_BLOCK = 64

_row_ends: ContextVar[list[int] | None] = ContextVar("cacheblend_row_ends", default=None)

Watcher = Callable[[int, torch.Tensor], None]
_watcher: ContextVar[Watcher | None] = ContextVar("cacheblend_watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Show every layer's attention weights, ``[heads, queries, keys]`` in fp32, to ``watcher(layer, weights)``.

    For passes of few queries (a question): the weights of a whole prompt would not fit into memory. Models that need eager
    attention are not shown.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def _weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    return scores[0].softmax(-1)


@contextmanager
def scattered(positions: torch.Tensor) -> Iterator[None]:
    """Run a forward whose queries stand at ascending ``positions``, ``[tokens]``."""
    on_cpu = positions.device.type == "cpu"
    token = _row_ends.set([int(p) + 1 for p in positions[_BLOCK - 1 :: _BLOCK]] if on_cpu else None)
    try:
        yield
    finally:
        _row_ends.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    watcher = _watcher.get()
    if watcher is not None:
        watcher(int(module.layer_idx), _weights(query, key, attention_mask, scaling))  # type: ignore[arg-type]
    ends = _row_ends.get()
    if ends is None or attention_mask is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, keys = query.shape[2], key.shape[2]
    # Laid out as the model wants it back, [batch, rows, heads, dim]: no copy at the end.
    out = query.new_empty(query.shape[0], rows, query.shape[1], value.shape[3])
    for start, end in zip(range(0, rows, _BLOCK), [*ends, keys], strict=False):
        block = slice(start, min(start + _BLOCK, rows))
        out[:, block] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, block],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=attention_mask[:, :, block, :end],
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
    return out, None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
