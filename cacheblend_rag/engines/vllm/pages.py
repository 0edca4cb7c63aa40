"""Finds a sequence's tokens in vLLM's paged cache: their slots, in runs of neighbours, and how kernels lay out a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.groups import NO_PAGE, BlockIds, MissingPageError, PageGroup
from cacheblend_rag.store.kv import LayerKV

_TILE = 16
_PAIR = 2


class PagedCache(Protocol):
    """Says how a model's paged cache is cut, and where it lies."""

    groups: Sequence[PageGroup]
    block_size: int
    device: torch.device


class Pages:
    """The pages of one sequence, and with them the slots of its positions: worked out once, for all layers and passes.

    Attributes:
        on_device: For each group of layers the slots, ``[positions]``, on the model's device: as many as there are pages for,
            at most ``tokens``. Those of a position without a page lie in the page that vLLM has in its place: :meth:`check`
            must have found none where these are written to.
        tables: For each group the block ids, ``[1, blocks]``, on the model's device.
    """

    def __init__(self, paged: PagedCache, block_ids: BlockIds, tokens: int):
        """Take the pages ``block_ids`` of a sequence of ``tokens``."""
        self._groups, self._size = paged.groups, paged.block_size
        positions = torch.arange(tokens)
        self._slots = [_slots(ids, positions[: len(ids) * self._size], self._size) for ids in block_ids]
        self.on_device = [sent(slots, paged.device) for slots in self._slots]
        self.tables = [sent(torch.tensor(list(ids), dtype=torch.int32)[None], paged.device) for ids in block_ids]

    def at(self, group: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of ``positions``, both ``[tokens]``, in host memory.

        Raises:
            MissingPageError: A position has no page: what vLLM keeps in place of one must be neither read nor written.
        """
        slots = self._slots[group]
        if len(positions) and int(positions.max()) >= len(slots):
            raise MissingPageError(f"there are pages for {len(slots)} positions, and none for {int(positions.max())}")
        return _present(slots[positions], self._size)

    def between(self, group: int, start: int, end: int) -> torch.Tensor:
        """Return the slots of the positions from ``start`` on, up to ``end`` or the last page; raises as :meth:`at`."""
        return _present(self._slots[group][start:end], self._size)

    def check(self, start: int, end: int) -> None:
        """Make sure that positions ``start`` to ``end`` have pages, and what the first of them sees; raises as :meth:`at`."""
        for index, group in enumerate(self._groups):
            self.at(index, torch.arange(group.first_visible(start), end))


def slots_of(block_ids: Sequence[int], positions: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots of ``positions``, both ``[tokens]``, in pages of ``size``; raises as :meth:`Pages.at`."""
    if len(positions) and int(positions.max()) >= len(block_ids) * size:
        raise MissingPageError(f"there are {len(block_ids)} pages, and none for position {int(positions.max())}")
    return _present(_slots(block_ids, positions, size), size)


def _slots(block_ids: Sequence[int], positions: torch.Tensor, size: int) -> torch.Tensor:
    blocks = torch.as_tensor(block_ids, dtype=torch.int64)
    return blocks[positions // size] * size + positions % size


def _present(slots: torch.Tensor, size: int) -> torch.Tensor:
    if bool((slots // size == NO_PAGE).any()):
        raise MissingPageError("vLLM keeps no pages for some of these positions: they lie before a window")
    return slots


def first_part(positions: torch.Tensor, max_tokens: int, max_runs: int) -> torch.Tensor:
    """Return the first of ascending ``positions``: at most ``max_tokens``, in at most ``max_runs`` runs of neighbours."""
    part = positions[:max_tokens]
    breaks = torch.nonzero(gaps(part)).flatten()
    return part if len(breaks) < max_runs else part[: int(breaks[max_runs - 1]) + 1]


def runs_in_pages(slots: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Cut ``slots`` where neighbours end and where a page of ``size`` does."""
    cuts = torch.nonzero(gaps(slots) | (slots[1:] % size == 0)).flatten() + 1
    return torch.tensor_split(slots, cuts) if len(slots) else ()


def gaps(values: torch.Tensor) -> torch.Tensor:
    """Say of every value but the first whether it does not follow the one before it."""
    return values[1:] != values[:-1] + 1


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
