"""Keeps the chunks that a registry holds itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.matching import Indices, Signatures, signatures_of


class AddedChunks:
    """Chunks in memory, as a :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""

    def __init__(self) -> None:
        """Start without any."""
        self._rows = count(1)
        self._row_of: dict[str, int] = {}
        self._chunks: dict[int, Chunk] = {}
        self._last = 0

    @property
    def generation(self) -> int:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return self._last

    def put(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks; one with a known id replaces the former."""
        for chunk in chunks:
            row = self._row_of.get(chunk.id)
            if row is not None and self._chunks[row].text != chunk.text:
                del self._chunks[row]
                row = None
            if row is None:
                row = self._last = next(self._rows)
            self._chunks[row] = chunk
            self._row_of[chunk.id] = row

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Remove chunks; unknown ids are ignored."""
        for chunk_id in chunk_ids:
            row = self._row_of.pop(chunk_id, None)
            if row is not None:
                del self._chunks[row]

    def ids(self) -> list[str]:
        """Return all ids."""
        return list(self._row_of)

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        new = [row for row in range(after + 1, self._last + 1) if row in self._chunks]
        return np.array(new, np.int64), signatures_of([self._chunks[row].text for row in new])

    def chunk_at(self, row: int) -> Chunk | None:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return self._chunks.get(row)

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return {chunk_id for chunk_id in chunk_ids if chunk_id in self._row_of}

    def named(self, chunk_id: str) -> Chunk | None:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        row = self._row_of.get(chunk_id)
        return None if row is None else self._chunks.get(row)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        names = sorted(name for name in list(self._row_of) if name > chunk_id)[:most]
        return [chunk for name in names if (chunk := self.named(name)) is not None]

    def count(self) -> int:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return len(self._row_of)
