"""Says when a blend is good enough: the bound that must hold, and how many prompts it takes to show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from cacheblend_rag.calibrate.compared import Comparison
from cacheblend_rag.calibrate.intervals import mean_bounds, mean_t_bounds, share_bounds
from cacheblend_rag.calibrate.judge import METRIC_NAMES, Metric
from cacheblend_rag.errors import InputError

MIN_RESAMPLED: Final = 20
"""Resampling fewer prompts says too little about a mean that a few of them dominate, as that of KL."""

_FEWEST: Final = 12
"""Prompts of a calibration by a standard that fewer would show, too."""

_FEW: Final = 8
_DOUBTS: Final = 0.8

Result = tuple[str, Comparison]
"""A prompt's group (prompts of one group share their chunks) and how a blend of it compares with full recompute."""


@dataclass(frozen=True)
class Bounds:
    """Holds a share with a lower and an upper bound; each of the two holds with the standard's confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Standard:
    """Says what a blend must reach.

    Attributes:
        agreement: Least agreement with full recompute.
        confidence: With which it must be shown.
        by: What agreement is. ``"tokens"``: the share of the answer's tokens that both hold likeliest. ``"likelihood"``:
            exp(-KL), the share of a token's probability that is kept, in the geometric mean. ``"answers"``: 1 less what
            their score by ``metric`` falls below full recompute's, in the mean over questions.
        bits: A blend must come as near as weights of so many bits do, on the same prompts: ``agreement`` is theirs, by
            likelihood, once it is measured. None takes ``agreement`` as it is given.
        metric: By which answers are scored; None where they are not.
        full: Full recompute's score by it, once it is measured.

    Raises:
        InputError: A value that is no share, or that nothing could show.
    """

    agreement: float = 0.99
    confidence: float = 0.95
    by: Literal["tokens", "likelihood", "answers"] = "tokens"
    bits: int | None = None
    metric: Metric | None = None
    full: float | None = None

    def __post_init__(self) -> None:
        """Refuse what nothing could reach."""
        for name in ("agreement", "confidence"):
            if not 0.5 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a share from 0.5 to below 1, such as 0.99.")

    @classmethod
    def as_good_by(cls, metric: Metric, agreement: float | None, confidence: float) -> Standard:
        """Return the standard of answers that score as well, before they are scored; five points may be lost by default."""
        return cls(0.95 if agreement is None else agreement, confidence, "answers", metric=metric)

    @classmethod
    def as_near_as(cls, bits: int, confidence: float = 0.95) -> Standard:
        """Return the standard of weights of so many bits, before it is measured."""
        return cls(confidence=confidence, by="likelihood", bits=bits)

    def measured(self, results: Sequence[Comparison]) -> Standard:
        """Return it with the agreement that its weights have; raises InputError where they change the model too much."""
        kl = float(np.mean([value for each in results for value in each.kl]))
        if not kl < math.log(2):
            raise InputError(
                f"Weights of {self.bits} bits are {kl:.2f} nats from this model's own answers: nothing to be as near as. "
                "Give more bits, or an agreement."
            )
        return replace(self, agreement=min(math.exp(-kl), math.nextafter(1, 0)))

    def scored(self, scores: Sequence[float]) -> Standard:
        """Return it with full recompute's scores; raises InputError where these leave nothing to lose."""
        assert self.metric is not None
        full = float(np.mean(scores))
        if not full > 1 - self.agreement:
            raise InputError(
                f"The {METRIC_NAMES[self.metric]} of full recompute on these questions is {full:.1%}: no blend could lose more "
                f"than the {1 - self.agreement:.1%} that it may. Give questions that this model can answer."
            )
        return replace(self, full=full)

    @property
    def needed(self) -> int:
        """Return how many prompts without common chunks it takes to show that it holds, if nothing is lost on any."""
        if self.by == "likelihood":
            return MIN_RESAMPLED
        return math.ceil(math.log(1 - self.confidence) / math.log(self.agreement))

    @property
    def usual(self) -> int:
        """Return how many prompts to calibrate on: of :attr:`needed` a single wrong answer would decide by luck."""
        return max(_FEWEST, 2 * self.needed)

    @property
    def most_kl(self) -> float:
        """Return the mean KL, in nats, at which exp(-KL) is the agreement."""
        return -math.log(self.agreement)

    def bounds(self, results: Sequence[Result]) -> Bounds:
        """Return the agreement of a blend."""
        groups, values = [], []
        for group, compared in results:
            found = (1 - compared.loss,) if self.metric else compared.kl if self.by == "likelihood" else compared.agrees
            values += [float(value) for value in found]
            groups += [group] * len(found)
        mean = float(np.mean(values))
        if self.by == "tokens":
            return Bounds(mean, *share_bounds(values, groups, self.confidence))
        if self.metric:
            low, high = mean_t_bounds(values, groups, self.confidence)
            # As many questions that lose nothing say no more than this about how many do.
            most = (1 - self.confidence) ** (1 / len(set(groups)))
            return Bounds(mean, max(0.0, min(low, most)), min(high, 2.0))
        low, high = mean_bounds(values, groups, self.confidence)
        return Bounds(math.exp(-mean), math.exp(-high), math.exp(-low))

    def shown_by(self, results: Sequence[Result]) -> bool:
        """Say whether these prompts show that the agreement holds."""
        return len({group for group, _ in results}) >= self.needed and self.bounds(results).low >= self.agreement

    def supported_by(self, results: Sequence[Result]) -> bool:
        """Say whether it holds on these prompts, shown or not: agreement, and KL, which tells more where tokens are few."""
        if self.bounds(results).value < self.agreement:
            return False
        kl = float(np.mean([value for _, compared in results for value in compared.kl]))
        return self.metric is not None or kl <= self.most_kl

    def within_reach(self, results: Sequence[Result], groups: Sequence[str]) -> bool:
        """Say whether a blend could still hold, if it agreed wholly on all prompts that it was not tried on.

        But by tokens it need not come so far: a blend is given up where the prompts tried make it likely that it does not hold.

        Args:
            results: What was measured.
            groups: The groups of the other prompts.
        """
        tokens = round(float(np.mean([len(compared.kl) for _, compared in results])))
        ideal = Comparison((True,) * tokens, (0.0,) * tokens, 0.0)
        whole = [*results, *((group, ideal) for group in groups)]
        if self.by != "tokens" and self._speaks_against(results):
            return False
        enough = len({group for group, _ in whole}) >= self.needed
        if not enough or self.by != "tokens":
            # A bound is no help here: it says little while nearly all values are zero.
            return self.supported_by(whole)
        return self.bounds(whole).low >= self.agreement

    def _speaks_against(self, results: Sequence[Result]) -> bool:
        """Say whether the mean KL or loss of prompts is above the limit, by a one-sided t bound that holds with 80%.

        Given up wrongly, a blend is followed by one that recomputes more: the error is on the safe side.
        """
        groups, harms = [group for group, _ in results], [float(np.mean(compared.kl)) for _, compared in results]
        if self.metric:
            harms = [compared.loss for _, compared in results]
        limit = 1 - self.agreement if self.metric else self.most_kl
        return len(harms) >= _FEW and mean_t_bounds(harms, groups, _DOUBTS)[0] > limit
