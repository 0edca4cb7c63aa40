"""Computes which pages of a sequence vLLM holds and the slots of its tokens, and lends a blend the missing pages.

For the pages that layers with a window lose, see "Windows" in docs/internals/vllm.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.store.kv import LayerKV

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig


BlockIds = Sequence[Sequence[int]]
"""Pages of a sequence: block ids for each group of layers, in order."""
NO_PAGE: Final = 0
"""Block id of a missing page in vLLM's block tables."""
# Chunked-local layers lose no page of a blended prompt, since a blended prompt is no longer than their first piece.
_KNOWN: Final = {FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec}


class MissingPageError(Exception):
    """Reports that a requested position has no page in vLLM's paged cache."""


@dataclass(frozen=True)
class PageGroup:
    """Describes the pages that vLLM holds for one KV cache group.

    Attributes:
        block_size: Tokens in a page.
        window: Tokens that the layers see, if vLLM frees the pages before the window; None if vLLM holds all pages.
    """

    block_size: int
    window: int | None

    def first_visible(self, position: int) -> int:
        """Return the first position that a token at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def first_kept(self, computed: int) -> int:
        """Return the index of the first page that vLLM still holds once ``computed`` tokens are computed."""
        return self.first_visible(computed) // self.block_size

    def keeps(self, start: int, end: int, computed: int) -> bool:
        """Return whether the positions ``start`` to ``end`` all have pages, once ``computed`` tokens are computed."""
        return start >= end or self.first_kept(computed) <= start // self.block_size


def page_groups(config: KVCacheConfig) -> tuple[PageGroup, ...]:
    """Return the groups in vLLM's order; groups of a kind in :func:`unknown_kinds` count as holding all pages."""
    specs = [_spec(group.kv_cache_spec) for group in config.kv_cache_groups]
    return tuple(
        PageGroup(int(spec.block_size), int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else None)
        for spec in specs
    )


def unknown_kinds(config: KVCacheConfig) -> list[str]:
    """Return the names of the kinds of KV cache in ``config`` that a blend cannot fill, in order."""
    kinds = {type(_spec(group.kv_cache_spec)) for group in config.kv_cache_groups}
    return sorted(kind.__name__.removesuffix("Spec") for kind in kinds - _KNOWN)


def _spec(spec: Any) -> Any:
    """Return the spec that represents a group: layers of one kind may differ only in the size of their heads."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


class PageLender:
    """Lends a blend the pages that the blend needs besides the pages that vLLM allocates."""

    def __init__(self, groups: Sequence[PageGroup]):
        """Lend to layers of ``groups``, in vLLM's order."""
        self._groups = tuple(groups)
        self._pool: BlockPool | None = None
        self._lent: dict[str, list[KVCacheBlock]] = {}

    def bind(self, pool: BlockPool) -> None:
        """Set the pool to lend from."""
        self._pool = pool

    def keeps(self, start: int, end: int) -> bool:
        """Return whether the positions ``start`` to ``end`` all have pages right after vLLM found or computed them."""
        return all(group.keeps(start, end, computed=end) for group in self._groups)

    def sees_back(self, start: int, end: int) -> bool:
        """Return whether all tokens that the token at ``start`` sees have pages during a blend up to ``end``."""
        return all(group.keeps(group.first_visible(start), start, computed=end) for group in self._groups)

    @property
    def lends(self) -> bool:
        """Return whether a blend has borrowed pages."""
        return bool(self._lent)

    def never(self, start: int, end: int, prompt_tokens: int) -> str | None:
        """Return why a blend from ``start`` to ``end`` of a prompt can never get its pages; None if the blend can."""
        if not self._lacking(start, end):
            return None
        assert self._pool is not None
        total = self._pool.num_gpu_blocks - 1  # one block stands for missing pages
        if (wanted := self._wanted(start, end, prompt_tokens)) <= total:
            return None
        return (
            f"its layers with a window need {wanted} of vLLM's blocks while the prompt is blended, and there are {total}: give "
            "vLLM more memory for its KV cache"
        )

    def ready(self, start: int, end: int, prompt_tokens: int) -> bool:
        """Return whether a blend from ``start`` to ``end`` can get its pages now."""
        if not self._lacking(start, end):
            return True
        assert self._pool is not None
        return not self._lent and self._wanted(start, end, prompt_tokens) <= self._pool.get_num_free_blocks()

    def complete(self, request_id: str, pages: BlockIds, start: int) -> tuple[tuple[int, ...], ...]:
        """Return ``pages``, with a lent page in place of each missing page from position ``start`` on.

        If the pool has too few pages (vLLM's own count may differ), none are lent, and the workers refuse the blend.
        """
        filled = [list(ids) for ids in pages]
        missing = [
            (ids, index)
            for ids, group in zip(filled, self._groups, strict=True)
            for index in range(start // group.block_size, len(ids))
            if ids[index] == NO_PAGE
        ]
        if missing:
            assert self._pool is not None
            if len(missing) <= self._pool.get_num_free_blocks():
                self._lent[request_id] = self._pool.get_new_blocks(len(missing))
                for (ids, index), block in zip(missing, self._lent[request_id], strict=True):
                    ids[index] = block.block_id
        return tuple(tuple(ids) for ids in filled)

    def take_back(self, request_ids: Iterable[str]) -> None:
        """Return the pages of ended blends to vLLM's pool."""
        for blocks in [self._lent.pop(name) for name in request_ids if name in self._lent]:
            assert self._pool is not None
            self._pool.free_blocks(blocks)

    def _lacking(self, start: int, end: int) -> int:
        """Return how many pages for the positions ``start`` to ``end`` vLLM does not allocate."""
        return sum(max(0, group.first_kept(end) - start // group.block_size) for group in self._groups)

    def _wanted(self, start: int, end: int, prompt_tokens: int) -> int:
        """Return the most pages that a prompt takes during its blend: vLLM's own pages and lent pages."""
        given = sum(-(-prompt_tokens // group.block_size) - group.first_kept(end) for group in self._groups)
        return given + self._lacking(start, end)


_TILE = 16
_PAIR = 2


class Pages:
    """Holds the pages of one sequence and the slots of its positions, computed once for all layers and passes.

    Attributes:
        on_device: Slots for each group of layers, ``[positions]``, on the model's device: as many as the pages hold, at
            most ``tokens``. The slot of a position without a page lies in vLLM's placeholder page: before a write,
            :meth:`check` must have found no such position.
        tables: Block ids for each group, ``[1, blocks]``, on the model's device.
    """

    def __init__(self, paged: Any, block_ids: BlockIds, tokens: int):
        """Compute the slots of a sequence of ``tokens`` in the pages ``block_ids`` of a :class:`PagedModel`."""
        self._groups, self._size = paged.groups, paged.block_size
        positions = torch.arange(tokens)
        self._slots = [_slots(ids, positions[: len(ids) * self._size], self._size) for ids in block_ids]
        self.on_device = [sent(slots, paged.device) for slots in self._slots]
        self.tables = [sent(torch.tensor(list(ids), dtype=torch.int32)[None], paged.device) for ids in block_ids]

    def at(self, group: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of ``positions``, both ``[tokens]``, in host memory.

        Raises:
            MissingPageError: A position has no page; vLLM's placeholder page must be neither read nor written.
        """
        slots = self._slots[group]
        if len(positions) and int(positions.max()) >= len(slots):
            raise MissingPageError(f"there are pages for {len(slots)} positions, and none for {int(positions.max())}")
        return _present(slots[positions], self._size)

    def check(self, start: int, end: int) -> None:
        """Check that positions ``start`` to ``end``, and all that ``start`` sees, have pages; raises as :meth:`at`."""
        for index, group in enumerate(self._groups):
            self.at(index, torch.arange(group.first_visible(start), end))


def slots_of(block_ids: Sequence[int], positions: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots of ``positions``, both ``[tokens]``, in pages of ``size`` tokens; raises as :meth:`Pages.at`."""
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
    """Cut ``slots`` into runs of neighbours, each within one page of ``size`` tokens."""
    cuts = torch.nonzero(gaps(slots) | (slots[1:] % size == 0)).flatten() + 1
    return torch.tensor_split(slots, cuts) if len(slots) else ()


def gaps(values: torch.Tensor) -> torch.Tensor:
    """Return, for every value but the first, whether the value is not one more than the value before it."""
    return values[1:] != values[:-1] + 1


class TiledPages:
    """Reads the tiled pages of vLLM's AMX kernels (bfloat16 on a CPU that has AMX).

    K of a page is ``[tokens / 16, head_dim / 2, 16, 2]``, with two neighbours of a key together. V follows K and is
    ``[head_dim / 16, tokens / 2, 16, 2]``, with two tokens together.
    """

    def __init__(self, cache: torch.Tensor):
        """Make views of the tiles in ``cache``, ``[pages, kv_heads, page_tokens, 2 * head_dim]``."""
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
    """Return the tokens ``first`` to ``end`` of a page of :func:`pages_of`, ``[kv_heads, tokens, head_dim]``."""
    if isinstance(pages, TiledPages):
        return pages.read(page, first, end)
    return LayerKV(*(side[page, :, first:end] for side in pages))


def pages_of(cache: torch.Tensor, on_cpu: bool, isa: str | None = None) -> LayerKV | TiledPages:
    """Return views of a layer's paged cache, each ``[pages, kv_heads, page_tokens, head_dim]``, or its tiles.

    The cache is ``[pages, kv_heads, page_tokens, 2 * head_dim]``; on a CPU the kernels' instruction set ``isa`` decides
    the layout of pages.
    """
    pages, heads, size, width = cache.shape
    dim = width // 2
    if not on_cpu:
        return LayerKV(cache[..., :dim], cache[..., dim:])  # strides follow any order in memory
    if isa == "amx":
        return TiledPages(cache)
    # Inside a page vLLM's other CPU kernels store K column-major, [head_dim, tokens], and V behind K, [tokens,
    # head_dim].
    halves = cache.view(pages, heads, 2, size * dim)
    keys = halves[:, :, 0].view(pages, heads, dim, size).transpose(2, 3)
    return LayerKV(keys, halves[:, :, 1].view(pages, heads, size, dim))
