"""How vLLM's attention kernels lay a layer's pages out in memory: as strides say it, or in tiles."""

from __future__ import annotations

import torch

from cacheblend_rag.store.kv import LayerKV

_TILE = 16
_PAIR = 2


class TiledPages:
    """The pages of vLLM's AMX kernels (bfloat16 on a CPU that has AMX), in tiles as the processor multiplies them.

    Of a page, K is ``[tokens / 16, head_dim / 2, 16, 2]``, two neighbours of a key together; V behind it is
    ``[head_dim / 16, tokens / 2, 16, 2]``, two tokens together.
    """

    def __init__(self, cache: torch.Tensor):
        """View ``cache``, ``[pages, kv_heads, page_tokens, 2 * head_dim]``."""
        pages, heads, size, width = cache.shape
        dim = width // 2
        keys, values = cache.view(pages, heads, 2, size * dim).unbind(2)
        self._keys = keys.view(pages, heads, size // _TILE, dim // _PAIR, _TILE, _PAIR)
        self._values = values.view(pages, heads, dim // _TILE, size // _PAIR, _TILE, _PAIR)

    def read(self, page: int, first: int, end: int) -> LayerKV:
        """Return a copy of the tokens ``first`` to ``end`` of a page, ``[kv_heads, tokens, head_dim]``."""
        keys = self._keys[page, :, first // _TILE : -(-end // _TILE)].transpose(2, 3).flatten(3).flatten(1, 2)
        values = self._values[page, :, :, first // _PAIR : -(-end // _PAIR)].permute(0, 2, 4, 1, 3).flatten(3)
        parts = (keys, _TILE), (values.flatten(1, 2), _PAIR)
        return LayerKV(*(part[:, first % step : first % step + end - first] for part, step in parts))


def read_page(pages: LayerKV | TiledPages, page: int, first: int, end: int) -> LayerKV:
    """Return the tokens ``first`` to ``end`` of a page, ``[kv_heads, tokens, head_dim]``, of what :func:`pages_of` returned."""
    if isinstance(pages, TiledPages):
        return pages.read(page, first, end)
    return LayerKV(*(side[page, :, first:end] for side in pages))


def pages_of(cache: torch.Tensor, on_cpu: bool, isa: str | None = None) -> LayerKV | TiledPages:
    """Return views of a layer's paged cache, each ``[pages, kv_heads, page_tokens, head_dim]``, or its tiles.

    Args:
        cache: ``[pages, kv_heads, page_tokens, 2 * head_dim]``.
        on_cpu: Whether CPU kernels keep it.
        isa: Their instruction set, as vLLM names it.
    """
    pages, heads, size, width = cache.shape
    dim = width // 2
    if not on_cpu:
        return LayerKV(cache[..., :dim], cache[..., dim:])  # whatever the order in memory: strides say it
    if isa == "amx":
        return TiledPages(cache)
    # Inside a page vLLM's other CPU kernels keep K column-major, [head_dim, tokens], and V behind it, [tokens, head_dim].
    halves = cache.view(pages, heads, 2, size * dim)
    keys = halves[:, :, 0].view(pages, heads, dim, size).transpose(2, 3)
    return LayerKV(keys, halves[:, :, 1].view(pages, heads, size, dim))
