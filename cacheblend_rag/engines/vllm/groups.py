"""Tells which pages of a sequence vLLM keeps, by group of layers, and lends a blend in the scheduler those that it does not.

Layers with a window lose what lies before it, and get no page before the window of the prompt's end. A blend computes tokens in
the middle of the prompt, too, and they look back. So it borrows the pages in between from vLLM's pool and gives them back when it
ends. Workers run one blend at a time, and so one at a time has borrowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig

BlockIds = Sequence[Sequence[int]]
"""A sequence's pages: for each group of layers the ids of its blocks, in order."""
NO_PAGE: Final = 0
"""Stands in vLLM's block tables for a page that is not there."""
# Chunked-local layers lose no page of a prompt that is blended: it is no longer than their first piece.
_KNOWN: Final = {FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec}


class MissingPageError(Exception):
    """KV is wanted that vLLM has no page for."""


@dataclass(frozen=True)
class PageGroup:
    """Says how vLLM keeps the pages of one KV cache group.

    Attributes:
        block_size: Tokens in a page.
        window: Tokens that its layers see, if vLLM takes back the pages before them; None if it keeps all.
    """

    block_size: int
    window: int | None

    def first_visible(self, position: int) -> int:
        """Return the first position that a token at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def first_kept(self, computed: int) -> int:
        """Return the index of the first page that is kept for the token behind ``computed`` others."""
        return self.first_visible(computed) // self.block_size

    def keeps(self, start: int, end: int, computed: int) -> bool:
        """Return whether the positions ``start`` to ``end`` all have pages, once ``computed`` tokens are computed."""
        return start >= end or self.first_kept(computed) <= start // self.block_size


def page_groups(config: KVCacheConfig) -> tuple[PageGroup, ...]:
    """Return the groups in vLLM's order; kinds that :func:`unknown_kinds` names count as keeping all pages."""
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
    """Return what stands for a group: layers of one kind may differ in the size of their heads alone."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


class PageLender:
    """Knows how many pages a blend needs besides those that vLLM gives it."""

    def __init__(self, groups: Sequence[PageGroup]):
        """Lend to layers of ``groups``, in vLLM's order."""
        self._groups = tuple(groups)
        self._pool: BlockPool | None = None
        self._lent: dict[str, list[KVCacheBlock]] = {}

    def bind(self, pool: BlockPool) -> None:
        """Lend from ``pool``."""
        self._pool = pool

    def keeps(self, start: int, end: int) -> bool:
        """Return whether the positions ``start`` to ``end`` all have pages when vLLM has just found or computed them."""
        return all(group.keeps(start, end, computed=end) for group in self._groups)

    def sees_back(self, start: int, end: int) -> bool:
        """Return whether what the token at ``start`` sees before it still has pages while a blend from there to ``end`` runs."""
        return all(group.keeps(group.first_visible(start), start, computed=end) for group in self._groups)

    @property
    def lends(self) -> bool:
        """Return whether a blend has borrowed pages."""
        return bool(self._lent)

    def never(self, start: int, end: int, prompt_tokens: int) -> str | None:
        """Return why a blend from ``start`` to ``end`` of a prompt can never have its pages, in words; None if it can."""
        if not self._lacking(start, end):
            return None
        assert self._pool is not None
        total = self._pool.num_gpu_blocks - 1  # one stands for what is not there
        if (wanted := self._wanted(start, end, prompt_tokens)) <= total:
            return None
        return (
            f"its layers with a window need {wanted} of vLLM's blocks while the prompt is blended, and there are {total}: give "
            "vLLM more memory for its KV cache"
        )

    def ready(self, start: int, end: int, prompt_tokens: int) -> bool:
        """Return whether a blend from ``start`` to ``end`` can have its pages now."""
        if not self._lacking(start, end):
            return True
        assert self._pool is not None
        return not self._lent and self._wanted(start, end, prompt_tokens) <= self._pool.get_num_free_blocks()

    def complete(self, request_id: str, pages: BlockIds, start: int) -> tuple[tuple[int, ...], ...]:
        """Return ``pages`` with pages lent for all positions from ``start`` on that have none.

        Where there are not enough, as vLLM's own count may differ, none are lent: the workers then refuse the blend.
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
        """Give the pages of blends that ended back to vLLM."""
        for blocks in [self._lent.pop(name) for name in request_ids if name in self._lent]:
            assert self._pool is not None
            self._pool.free_blocks(blocks)

    def _lacking(self, start: int, end: int) -> int:
        """Return how many pages vLLM does not give for the positions ``start`` to ``end``."""
        return sum(max(0, group.first_kept(end) - start // group.block_size) for group in self._groups)

    def _wanted(self, start: int, end: int, prompt_tokens: int) -> int:
        """Return how many pages that prompt takes while it is blended, with those that vLLM gives it at the most."""
        given = sum(-(-prompt_tokens // group.block_size) - group.first_kept(end) for group in self._groups)
        return given + self._lacking(start, end)
