"""Make paged KV caches in every memory order of vLLM's backends, and positions scattered as selections are."""

from __future__ import annotations

import torch

# Order in memory of the logical [pages, kv_heads, page_tokens, ...].
ORDERS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3), "heads outermost": (1, 0, 2, 3)}


def paged_cache(
    order: str, pages: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[pages, kv_heads, page_tokens, head_dim]`` of one cache that holds NaN."""
    axes = ORDERS[order]
    shape = (pages, heads, size, 2 * dim)
    memory = torch.full([shape[axis] for axis in axes], float("nan"), dtype=dtype, device=device)
    cache = memory.permute([axes.index(axis) for axis in range(4)])
    return cache[..., :dim], cache[..., dim:]


def columns_first(pages: int, heads: int, size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as vLLM's CPU kernels hold them: a page's keys column by column, its values behind them."""
    memory = torch.full((pages, heads, 2, size * dim), float("nan"))
    keys = memory[:, :, 0].unflatten(2, (dim, size)).transpose(2, 3)
    return keys, memory[:, :, 1].unflatten(2, (size, dim))


def scattered(tokens: int, count: int, seed: int = 0) -> torch.Tensor:
    """Return ``count`` ascending positions below ``tokens``: single ones, short runs, and the last run, as a question is."""
    generator = torch.Generator().manual_seed(seed)
    tail = min(5, count)
    chosen = torch.randperm(tokens - tail, generator=generator)[: count - tail]
    return torch.cat([chosen, torch.arange(tokens - tail, tokens)]).sort().values
