"""Estimates how long tuning will take, by timing a small part of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from cacheblend_lab.tuning.candidates import NEAREST
from cacheblend_lab.tuning.judging import DocstringTask, Vectors
from cacheblend_lab.tuning.questions import Split, TuningQuestion
from cacheblend_lab.tuning.students import STUDENTS
from cacheblend_lab.tuning.teacher import Judged
from cacheblend_lab.tuning.training import Lessons, TrainSettings
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

_TRIED: Final = 16


def timed(work: Callable[[], object]) -> float:
    """Call ``work`` and return how many seconds the call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def estimate_training(
    split: Split, vectors: Vectors, index: ChunkIndex, embedder: Embedder, settings: TrainSettings
) -> float:
    """Take two steps with a temporary student; return an upper estimate of the seconds that training takes.

    ``vectors`` are those of the questions in ``split.train``, ``[questions, dim]``.
    """
    student = STUDENTS[settings.part](embedder.model)
    asked = zip(split.train[: settings.size], vectors, strict=False)
    batch = [_unread(question, vector, index) for question, vector in asked]
    lessons = Lessons(student, batch, index, embedder, settings)
    rows = range(len(batch))
    lessons.step(rows, 0.0)  # warm up
    step = timed(lambda: lessons.step(rows, 0.0))
    seconds = step * settings.rounds * -(-len(split.train) // settings.size)
    if student.documents:  # the student embeds chunks before the first round and after each round
        seconds += (settings.rounds + 1) * estimate_embedding(index, embedder, len(split.dev) * NEAREST)
    return seconds


def _unread(question: TuningQuestion, vector: Vectors, index: ChunkIndex) -> Judged:
    chunks = tuple(name for name, _ in index.nearest(vector, _TRIED))
    return Judged(question, chunks, (0.0,) * (len(chunks) + 1))


def estimate_embedding(index: ChunkIndex, embedder: Embedder, most: int | None = None) -> float:
    """Embed some chunks; return the estimated seconds for all chunks, or for at most ``most`` chunks."""
    texts = [chunk.text for chunk, _ in zip(index.chunks(), range(_TRIED), strict=False)]
    count = index.count() if most is None else min(most, index.count())
    return timed(lambda: embedder.texts(texts)) * count / max(1, len(texts))


def estimate_checking(embedder: Embedder, elsewhere: int, times: int) -> float:
    """Search a few out-of-domain passages; return the estimated seconds of ``times`` searches of ``elsewhere`` ones."""

    def check() -> None:
        task = DocstringTask(embedder, _TRIED)
        task.ranks(embedder.questions(task.questions))

    check()  # warm up: the first call collects the passages
    return timed(check) * times * elsewhere / _TRIED


def in_words(seconds: float) -> str:
    """Return a duration as text, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def total(parts: Sequence[tuple[str, float]]) -> str:
    """Return the sum of several durations as text, with each duration in brackets."""
    listed = ", ".join(f"{in_words(seconds)} {name}" for name, seconds in parts)
    return f"{in_words(sum(seconds for _, seconds in parts))} ({listed})"
