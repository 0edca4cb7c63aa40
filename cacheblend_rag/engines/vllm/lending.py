"""Lends pages to a blend, in the scheduler: vLLM gives layers with a window none before the window of its end.

A blend computes tokens in the middle of the prompt, too, and they look back. So it borrows the pages in between from vLLM's pool
and gives them back when it ends. Workers run one blend at a time, and so one at a time has borrowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.groups import NO_PAGE, BlockIds, PageGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


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
