"""Measures how well questions find their chunks before and after tuning, on the index and out of domain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from random import Random
from typing import Any, Final, Protocol

import numpy as np

from cacheblend_lab.intervals import mean_interval
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.embedding import Embedder

DEPTH: Final = 20
"""Last rank that counts as found."""

Vectors = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Gain:
    """Holds a measure before and after tuning, as shares of 1.

    Attributes:
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


_MODULES: Final = (
    "argparse asyncio collections configparser contextlib csv datetime decimal difflib email.message fractions "
    "ftplib functools heapq http.client imaplib inspect io ipaddress json logging mailbox os pathlib pickle "
    "random re shutil smtplib socket sqlite3 statistics string subprocess tarfile tempfile textwrap threading "
    "tokenize unittest urllib.parse uuid wave xml.dom.minidom zipfile "
)
_SHORTEST: Final = 80
_LONGEST: Final = 400  # characters; enough to distinguish the passages
_FEWEST_WORDS: Final = 4


class DocstringTask:
    """Holds passages of Python's standard library, and one question for each passage: the first line of a docstring.

    The docstrings need no download, and are real English on other subjects than the user's documents.

    Attributes:
        questions: First lines of the docstrings, in the order of the passages.
    """

    def __init__(self, embedder: Embedder, count: int, others: bool = False):
        """Draw and embed ``count`` passages; ``others`` draws up to ``count`` different ones.

        Raises:
            InputError: Python runs without docstrings (``-OO``).
        """
        pairs = _pairs()
        if len(pairs) < count:
            raise InputError(
                "Python runs without its docstrings (-OO), which the out-of-domain check is made of; run it without -OO."
            )
        drawn = Random(0).sample(sorted(pairs.items()), count)
        if others:
            rest = sorted(pairs.items() - set(drawn))
            drawn = Random(1).sample(rest, min(count, len(rest)))
        self.questions = [question for question, _ in drawn]
        self._texts = Texts(embedder.texts([passage for _, passage in drawn]))

    def ranks(self, vectors: Vectors) -> list[int]:
        """Return the rank of each question's passage, 0 beyond :data:`DEPTH`; ``vectors`` are ``[questions, dim]``."""
        scores = self._texts.similarity(vectors)
        own = np.diagonal(scores)[:, None]
        found = 1 + (scores > own).sum(1)
        return [int(rank) if rank <= DEPTH else 0 for rank in found]


@cache
def _pairs() -> dict[str, str]:
    """Return the rest of docstrings by their first lines; short docstrings and ambiguous first lines are left out."""
    found: dict[str, str | None] = {}
    for owner in {id(owner): owner for owner in _owners()}.values():
        first, _, rest = (inspect.getdoc(owner) or "").partition("\n\n")
        first, rest = " ".join(first.split()), rest.strip()[:_LONGEST]
        if len(first.split()) >= _FEWEST_WORDS and len(rest) >= _SHORTEST:
            found[first] = rest if found.get(first, rest) == rest else None
    return {first: rest for first, rest in found.items() if rest is not None}


def _owners() -> Iterator[Any]:
    for name in _MODULES.split():
        module = import_module(name)
        for _, value in inspect.getmembers(module, lambda v: inspect.isroutine(v) or inspect.isclass(v)):
            yield value
            if inspect.isclass(value):
                yield from (member for label, member in inspect.getmembers(value, inspect.isroutine) if label[0] != "_")
