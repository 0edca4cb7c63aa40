"""Finds the vectors nearest to a question, in memory: FAISS compares it with every one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.embedding import Vectors

_FIRST = 64  # vectors, at least, whose chunks are looked at


class VectorSearch:
    """Finds what is nearest to a question, following the database; :meth:`search` relies on a transaction's lock."""

    def __init__(self, database: IndexDatabase):
        """Follow ``database``; nothing is read before the first search."""
        self._database, self._vectors = database, database.vectors
        self._generation: Hashable = None
        self._held: Any = None
        self._last = 0  # the highest id that is held

    def search(self, question: Vectors, k: int) -> list[tuple[int, float]]:
        """Return the rows and cosine similarities of the ``k`` chunks whose best window is nearest to ``question``."""
        self._follow()
        if self._held is None:
            return []
        if question.shape[0] != self._held.d:
            raise StoreError(
                f"The embedding model gives vectors of {question.shape[0]} numbers, the index in "
                f"{self._database.path.parent} holds {self._held.d}. Rebuild the index."
            )
        total, wanted = self._held.ntotal, max(4 * k, _FIRST)
        while True:
            ids = self._held.search(question[None], min(wanted, total))[1][0]
            found = self._vectors.nearest(ids, question)
            if len(found) >= k or wanted >= total:
                return found[:k]
            wanted *= 4  # several windows of one chunk, or vectors that are gone, were among them

    def _follow(self) -> None:
        generation = self._database.generation()
        if generation == self._generation:
            return
        if self._held is not None and self._held.ntotal > 1000 + 1.5 * self._vectors.count():
            self._held = None  # most of them are gone
        self._read_new()
        self._generation = generation

    def _read_new(self) -> None:
        import faiss

        for ids, vectors in self._vectors.after(self._last if self._held is not None else 0):
            # Vectors of another length follow only where all were replaced.
            if self._held is None or self._held.d != vectors.shape[1]:
                self._held = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._held.add_with_ids(vectors, ids)
            self._last = int(ids[-1])
