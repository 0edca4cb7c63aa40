"""Tells which pages of a sequence vLLM keeps, by group of layers: those with a window lose what lies before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
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
