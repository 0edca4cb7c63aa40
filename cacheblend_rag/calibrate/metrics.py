"""Scores answers: exact match and token F1 as in SQuAD, F1 over the model's tokens, Rouge-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

from cacheblend_rag.errors import ModelError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return ``text`` as SQuAD compares it: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised answer equals one of the references, else 0."""
    return float(any(normalize(answer) == normalize(reference) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best F1 of the answer's words against a reference's, both normalised."""
    return max(_f1(normalize(answer).split(), normalize(reference).split()) for reference in references)


def f1_of_tokens(answer: str, references: Sequence[str], encode: Callable[[str], Sequence[int]]) -> float:
    """Return the best F1 over the model's own tokens of the normalised texts, as the paper computes it."""
    got = _encoded(encode, normalize(answer))
    return max(_f1(got, _encoded(encode, normalize(reference))) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the best Rouge-L F-measure against a reference, with stemming, as rouge-score computes it.

    Raises:
        ModelError: rouge-score is not installed.
    """
    scorer = _scorer()
    return max(float(scorer.score(reference, answer)["rougeL"].fmeasure) for reference in references)


@lru_cache(maxsize=1)
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ModelError("Rouge-L needs rouge-score: pip install 'cacheblend-rag[calibrate]'.") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def _encoded(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    return list(encode(text)) if text else []


def _f1(got: Sequence[Hashable], want: Sequence[Hashable]) -> float:
    if not got or not want:
        return float(list(got) == list(want))
    common = sum((Counter(got) & Counter(want)).values())
    if not common:
        return 0.0
    precision, recall = common / len(got), common / len(want)
    return 2 * precision * recall / (precision + recall)
