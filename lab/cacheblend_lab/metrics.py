"""Scores answers by F1 over the model's tokens, and by Rouge-L."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cacheblend_rag.calibrate.metrics import f1_of, normalize


def f1_of_tokens(answer: str, references: Sequence[str], encode: Callable[[str], Sequence[int]]) -> float:
    """Return the best F1 over the model's own tokens of the normalised texts, as the paper computes it."""
    got = _encoded(encode, normalize(answer))
    return max(f1_of(got, _encoded(encode, normalize(reference))) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the best Rouge-L F-measure against a reference, with stemming, as rouge-score computes it."""
    scorer = _scorer()
    return max(float(scorer.score(reference, answer)["rougeL"].fmeasure) for reference in references)


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def _encoded(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    return list(encode(text)) if text else []
