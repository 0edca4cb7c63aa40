"""Measures how well questions find their chunks before and after tuning: ranks, recall@k, MRR, gains with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from cacheblend_lab.intervals import mean_interval
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.prompts.chunk import Chunk

DEPTH: Final = 20
"""Last rank that counts as found."""

Vectors = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Gain:
    """Holds a measure before and after tuning, as shares of 1.

    Attributes:
        before: Mean with the embedding model.
        after: Mean with the tuned query encoder.
        low: Lower end of the difference's 95% interval, over paired questions with groups resampled; if there is no
            interval (too few questions, or all alike), the smaller of 0 and the difference.
        high: Upper end of the interval; without an interval, the larger of 0 and the difference.
    """

    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """Return ``after - before``."""
        return self.after - self.before

    @property
    def sure(self) -> bool:
        """Return whether ``after`` is better than ``before`` with 95% confidence."""
        return self.low > 0 and self.difference > 0


def gain(before: Sequence[float], after: Sequence[float], groups: Sequence[str]) -> Gain:
    """Return the gain from the values of each question before and after tuning."""
    difference = [b - a for a, b in zip(before, after, strict=True)]
    interval = mean_interval(difference, groups)
    mean = float(np.mean(difference))
    # If all differences are equal, an interval of width 0 would make a handful of questions look conclusive.
    low, high = interval or (min(mean, 0.0), max(mean, 0.0))
    return Gain(float(np.mean(before)), float(np.mean(after)), low, high)


class Texts:
    """Holds the vectors of texts in memory; a text of several windows counts by its nearest window, as in an index."""

    def __init__(self, windows: Sequence[Vectors]):
        """Store each text's vectors, ``[windows, dim]``."""
        self._vectors = np.concatenate(list(windows))
        self._starts = np.cumsum([0, *map(len, windows)])[:-1]

    def similarity(self, vectors: Vectors) -> Vectors:
        """Return the similarity of each text to each of ``vectors [..., dim]``: ``[..., texts]``."""
        return np.maximum.reduceat(vectors @ self._vectors.T, self._starts, axis=-1)


class Searched(Protocol):
    """Finds chunks, as an index does."""

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """See :meth:`ChunkIndex.nearest`."""

    def chunk(self, chunk_id: str) -> Chunk:
        """See :meth:`ChunkIndex.chunk`."""


def ranks(index: Searched, questions: Sequence[TuningQuestion], vectors: Vectors) -> list[int]:
    """Return the rank, from 1, of the first chunk that answers each question; 0 if it is beyond :data:`DEPTH`."""
    found = []
    for question, vector in zip(questions, vectors, strict=True):
        hits = (index.chunk(name) for name, _ in index.nearest(vector, DEPTH))
        found.append(next((rank for rank, chunk in enumerate(hits, 1) if question.answered_by(chunk)), 0))
    return found


def recall(of: Sequence[int], k: int) -> list[float]:
    """Return 1 for each rank among the first ``k``, else 0."""
    return [float(0 < rank <= k) for rank in of]


def reciprocal(of: Sequence[int]) -> list[float]:
    """Return the reciprocal of each rank, and 0 for rank 0; the mean is MRR@20."""
    return [1 / rank if rank else 0.0 for rank in of]


MEASURES: Final[dict[str, Callable[[Sequence[int]], list[float]]]] = {
    "recall_at_1": lambda of: recall(of, 1),
    "recall_at_5": lambda of: recall(of, 5),
    "recall_at_20": lambda of: recall(of, 20),
    "mrr": reciprocal,
}


def gains(before: Sequence[int], after: Sequence[int], groups: Sequence[str]) -> dict[str, Gain]:
    """Return the gain of every measure of ranks."""
    return {name: gain(of(before), of(after), groups) for name, of in MEASURES.items()}
