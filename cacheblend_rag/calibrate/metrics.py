"""Scores answers by exact match and token F1 as in SQuAD, and judges a blend's answers for calibration."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Metric = Literal["f1", "em"]
METRIC_NAMES: Final[dict[Metric, str]] = {"f1": "F1", "em": "exact match"}
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
    return max(f1_of(normalize(answer).split(), normalize(reference).split()) for reference in references)


def f1_of(got: Sequence[Hashable], want: Sequence[Hashable]) -> float:
    """Return the F1 of the items of two sequences, each item as often as it stands there."""
    if not got or not want:
        return float(list(got) == list(want))
    common = sum((Counter(got) & Counter(want)).values())
    if not common:
        return 0.0
    precision, recall = common / len(got), common / len(want)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Judge:
    """Scores the answers to one question, as `cacheblend eval` does.

    Attributes:
        metric: The metric.
        answers: The right answers.
        tokens: Maximum number of tokens of an answer, which also ends with its first line.
        decode: Converts token ids to text.
    """

    metric: Metric
    answers: tuple[str, ...]
    tokens: int
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether the answer is complete: later tokens would not change its score."""
        return len(ids) >= self.tokens or "\n" in self.decode(ids).lstrip()

    def score(self, ids: Sequence[int]) -> float:
        """Return the score of an answer, from 0 to 1."""
        score = f1 if self.metric == "f1" else exact_match
        return score(self.decode(ids).strip().split("\n")[0].strip(), self.answers)
