"""Nearest-neighbour search over the vectors of an index, in memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.embedding import Vectors


class VectorSearch:
    """A FAISS index in memory that follows the database. Use inside a transaction, whose lock it relies on."""

    def __init__(self, database: IndexDatabase):
        """Follow ``database``; nothing is read before the first search."""
        self._database = database
        self._generation: Hashable = None
        self._chunk_of: dict[int, int] = {}
        self._chunks = 0
        self._faiss: Any = None

    def search(self, question: Vectors, k: int) -> list[tuple[int, float]]:
        """Return the rows and scores of the ``k`` chunks whose best window is nearest to ``question``."""
        self._follow()
        if not self._chunk_of:
            return []
        if question.shape[0] != self._faiss.d:
            raise StoreError(
                f"The embedding model gives vectors of {question.shape[0]} numbers, the index in "
                f"{self._database.path.parent} holds {self._faiss.d}. Rebuild the index."
            )
        wanted, windows = min(k, self._chunks), k
        while True:
            scores, ids = self._faiss.search(question[None], min(windows, self._faiss.ntotal))
            best: dict[int, float] = {}
            for score, vector in zip(scores[0].tolist(), ids[0].tolist(), strict=True):
                best.setdefault(self._chunk_of[vector], score)
            if len(best) >= wanted:
                return list(best.items())[:k]
            windows *= 2

    def _follow(self) -> None:
        import faiss

        generation = self._database.generation()
        if generation == self._generation:
            return
        now = self._database.vector_rows()
        gone, new = self._chunk_of.keys() - now.keys(), sorted(now.keys() - self._chunk_of.keys())
        if len(gone) == len(self._chunk_of):
            self._faiss = None  # a rebuilt index may have vectors of another length
        elif gone:
            self._faiss.remove_ids(np.array(sorted(gone), np.int64))
        self._chunk_of = {row: chunk for row, chunk in self._chunk_of.items() if row in now}
        if new:
            vectors = self._database.vectors_from(new[0])
            if self._faiss is None:
                self._faiss = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._faiss.add_with_ids(vectors, np.array(new, np.int64))
            self._chunk_of = now
        self._chunks = len(set(self._chunk_of.values()))
        self._generation = generation
