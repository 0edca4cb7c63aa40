"""Searches a few chunks in place of the index while the encoder of the chunks is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cacheblend_lab.tuning.judging import Texts, Vectors
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_lab.tuning.students import Both
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

NEAREST: Final = 32
"""Chunks taken for each question, besides the known relevant chunks."""


class Rehearsal:
    """Holds the chunks nearest to some questions in the index and their relevant chunks, embedded by the student."""

    def __init__(self, index: ChunkIndex, questions: Sequence[TuningQuestion], embedder: Embedder, student: Both):
        """Choose the chunks; :meth:`embed` must be called before a search."""
        self._embedder = Embedder(embedder.name, student.model)
        self._student = student
        names = dict.fromkeys(name for question in questions for name in sorted(index.known(sorted(question.relevant))))
        for vector in embedder.questions([question.text for question in questions]):
            names.update(dict.fromkeys(name for name, _ in index.nearest(vector, NEAREST)))
        self._chunks = {name: index.chunk(name) for name in names}
        self._names = list(names)

    def embed(self) -> None:
        """Embed all chunks by the student's current weights."""
        self._student.model.eval()
        self._texts = Texts(self._embedder.texts([self._chunks[name].text for name in self._names]))
        self._student.model.train()

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """See :meth:`ChunkIndex.nearest`."""
        scores = self._texts.similarity(vector)
        return [(self._names[at], float(scores[at])) for at in np.argsort(-scores, kind="stable")[:k]]

    def chunk(self, chunk_id: str) -> Chunk:
        """See :meth:`ChunkIndex.chunk`."""
        return self._chunks[chunk_id]
