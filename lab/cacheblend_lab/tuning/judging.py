"""Judges how well questions find their chunks, before and after: ranks, recall@k, MRR, the gain with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.calibrate.intervals import mean_interval
from cacheblend_rag.prompts.chunk import Chunk

DEPTH: Final = 20
"""Chunks behind this rank count as not found."""

Vectors = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Gain:
    """A measure before and after, as shares of 1.

    Attributes:
        before: Its mean with the embedding model.
        after: Its mean with the tuned query encoder.
        low: Lower end of the 95% interval of the difference, question by question, groups resampled; ``after - before`` where
            the questions are too few, or all alike.
        high: Upper end of it.
    """

    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """Return how much better it has become."""
        return self.after - self.before

    @property
    def sure(self) -> bool:
        """Return whether it is better with 95% confidence."""
        return self.low > 0 and self.difference > 0


def gain(before: Sequence[float], after: Sequence[float], groups: Sequence[str]) -> Gain:
    """Return the gain over questions asked before and after."""
    difference = [b - a for a, b in zip(before, after, strict=True)]
    interval = mean_interval(difference, groups)
    mean = float(np.mean(difference))
    # All questions alike: an interval of no width would call a handful of them proof.
    low, high = interval or (min(mean, 0.0), max(mean, 0.0))
    return Gain(float(np.mean(before)), float(np.mean(after)), low, high)


class Texts:
    """Texts in memory; one of several windows is as near as the nearest of them, as in an index."""

    def __init__(self, windows: Sequence[Vectors]):
        """Take each text's vectors, ``[windows, dim]``."""
        self._vectors = np.concatenate(list(windows))
        self._starts = np.cumsum([0, *map(len, windows)])[:-1]

    def similarity(self, vectors: Vectors) -> Vectors:
        """Return how near each text is to each of ``vectors [..., dim]``: ``[..., texts]``."""
        return np.maximum.reduceat(vectors @ self._vectors.T, self._starts, axis=-1)


class Searched(Protocol):
    """Finds chunks, as an index does."""

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """See :meth:`ChunkIndex.nearest`."""

    def chunk(self, chunk_id: str) -> Chunk:
        """See :meth:`ChunkIndex.chunk`."""


def ranks(index: Searched, questions: Sequence[TuningQuestion], vectors: Vectors) -> list[int]:
    """Return the rank of the first chunk that answers each question, from 1; 0 where none is among the first :data:`DEPTH`."""
    found = []
    for question, vector in zip(questions, vectors, strict=True):
        hits = (index.chunk(name) for name, _ in index.nearest(vector, DEPTH))
        found.append(next((rank for rank, chunk in enumerate(hits, 1) if question.answered_by(chunk)), 0))
    return found


def recall(of: Sequence[int], k: int) -> list[float]:
    """Return for each rank whether it is among the first ``k``."""
    return [float(0 < rank <= k) for rank in of]


def reciprocal(of: Sequence[int]) -> list[float]:
    """Return the reciprocal of each rank, 0 for what was not found; its mean is MRR@20."""
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
