"""Counts how often the answer is right, and how often a retrieved passage holds the answer, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from cacheblend_lab.intervals import share_interval
from cacheblend_lab.realm.inputs import Collator
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.reading import Library, SpanAnswer, answer, as_queries
from cacheblend_lab.realm.runs import Say
from cacheblend_rag.errors import InputError

RECALLS: Final = (1, 5, 20)
_BATCH = 16


def evaluate(
    model: RealmModel,
    library: Library,
    questions: Sequence[RealmQuestion],
    collator: Collator,
    k: int = 5,
    say: Say = lambda done, of, at: None,
) -> list[dict[str, Any]]:
    """Answer questions, and score each answer.

    Args:
        model: A fine-tuned model; for any other model only the recalls are meaningful.
        library: Passages to retrieve from.
        questions: Questions to answer.
        collator: The model's collator.
        k: Passages read for each question.
        say: Called after each batch.

    Returns:
        One row per question: ``question``, ``answer``, ``probability``, ``em`` and ``recall@k`` for :data:`RECALLS`.
        The recall counts the passages known to answer the question, or the passages that contain an answer if none is
        known.

    Raises:
        InputError: ``questions`` is empty.
    """
    if not questions:
        raise InputError("There are no questions to evaluate.")
    rows = []
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        answers = answer(model, library, collator, batch, k)
        found = retrieve_many(model, library, collator, batch)
        rows += [_row(*each, library) for each in zip(batch, answers, found, strict=True)]
        say(len(rows), len(questions), "")
    return rows


def retrieve_many(
    model: RealmModel, library: Library, collator: Collator, questions: Sequence[RealmQuestion]
) -> list[list[int]]:
    """Return the passages of each question, best first: as many as the largest recall needs."""
    with torch.no_grad():
        vectors = model.query(collator.queries(as_queries(model, questions)))
    return library.index.search(vectors, max(RECALLS))


def summary(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> dict[str, Any]:
    """Return the mean of each score of :func:`evaluate` with its 95% interval.

    Args:
        rows: Rows of :func:`evaluate`, or other rows with some of its scores.
        groups: Group of each row; questions of one group are not independent.
    """
    found: dict[str, Any] = {"questions": len(rows)}
    for name in (name for name in ("em", *(f"recall@{k}" for k in RECALLS)) if name in rows[0]):
        values = [float(row[name]) for row in rows]
        low, high = share_interval(values, groups)
        found[name] = {"mean": sum(values) / len(values), "low": low, "high": high}
    return found


def _row(question: RealmQuestion, said: SpanAnswer, found: Sequence[int], library: Library) -> dict[str, Any]:
    if question.passages:
        hits = [at in question.passages for at in found]
    else:
        hits = [question.pattern.search(library.passages[at].text) is not None for at in found]
    recalls = {f"recall@{k}": float(any(hits[:k])) for k in RECALLS}
    return {
        "question": question.text,
        "answer": said.text,
        "probability": said.probability,
        "em": question.right(said.text),
        **recalls,
    }
