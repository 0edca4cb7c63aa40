"""Scores answers by the metric of the user's own questions, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from cacheblend_rag.calibrate.metrics import exact_match, f1, rouge_l

Metric = Literal["f1", "em", "rouge-l"]
METRICS: Final[tuple[Metric, ...]] = get_args(Metric)
METRIC_NAMES: Final[dict[Metric, str]] = {"f1": "F1", "em": "exact match", "rouge-l": "Rouge-L"}
_SCORES: Final[dict[Metric, Callable[[str, Sequence[str]], float]]] = {"f1": f1, "em": exact_match, "rouge-l": rouge_l}


@dataclass(frozen=True)
class Judge:
    """Scores the answers to one question, as `cacheblend eval` does.

    Attributes:
        metric: The metric.
        answers: The right answers.
        tokens: Maximum number of tokens of an answer.
        one_line: Whether only the first line counts and ends the answer.
        decode: Converts token ids to text.
    """

    metric: Metric
    answers: tuple[str, ...]
    tokens: int
    one_line: bool
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether the answer is complete: later tokens would not change its score."""
        return len(ids) >= self.tokens or (self.one_line and "\n" in self.decode(ids).lstrip())

    def score(self, ids: Sequence[int]) -> float:
        """Return the score of an answer, from 0 to 1."""
        text = self.decode(ids).strip()
        return _SCORES[self.metric](text.split("\n")[0].strip() if self.one_line else text, self.answers)
