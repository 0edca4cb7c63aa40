"""Defines when a blend is good enough: the bound that must hold, and the number of prompts that show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from cacheblend_rag.calibrate.compared import Comparison
from cacheblend_rag.calibrate.intervals import mean_bounds, mean_t_bounds, share_bounds
from cacheblend_rag.calibrate.metrics import METRIC_NAMES, Metric
from cacheblend_rag.errors import InputError

MIN_RESAMPLED: Final = 20
"""Minimum number of prompts for resampling a mean that few prompts dominate, such as the mean KL."""

_FEWEST: Final = 12
"""Minimum number of prompts of a calibration, even if the standard needs fewer."""

_FEW: Final = 8
_DOUBTS: Final = 0.8

Result = tuple[str, Comparison]
"""A prompt's group (prompts of one group share their chunks), and a blend's comparison with full recompute."""


@dataclass(frozen=True)
class Bounds:
    """Holds a share with a lower and an upper bound; each bound holds with the standard's confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Standard:
    """Defines what a blend must reach.

    Attributes:
        agreement: Least agreement with full recompute.
        confidence: Confidence level required.
        by: Kind of agreement. ``"tokens"``: the share of the answer's tokens on whose likeliest token blend and full
            recompute agree. ``"likelihood"``: exp(-KL), the geometric mean of the share of a token's probability that
            the blend retains. ``"answers"``: 1 minus the mean over questions of how far the blend's score by ``metric``
            falls below full recompute's score.
        bits: Number of bits of the weights that a blend must come as near as, on the same prompts. ``agreement`` is
            then the agreement of these weights, by likelihood, once it is measured. None uses ``agreement`` as given.
        metric: Metric that scores answers; None if answers are not scored.
        full: Full recompute's score by ``metric``, once it is measured.

    Raises:
        InputError: ``agreement`` or ``confidence`` is outside the range from 0.5 to below 1.
    """

    agreement: float = 0.99
    confidence: float = 0.95
    by: Literal["tokens", "likelihood", "answers"] = "tokens"
    bits: int | None = None
    metric: Metric | None = None
    full: float | None = None

    def __post_init__(self) -> None:
        """Raise InputError for an agreement or a confidence outside the range from 0.5 to below 1."""
        for name in ("agreement", "confidence"):
            if not 0.5 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a share from 0.5 to below 1, such as 0.99.")

    @classmethod
    def as_good_by(cls, metric: Metric, agreement: float | None, confidence: float) -> Standard:
        """Return the standard of answers that score as well; the default allows a loss of five points."""
        return cls(0.95 if agreement is None else agreement, confidence, "answers", metric=metric)

    @classmethod
    def as_near_as(cls, bits: int, confidence: float = 0.95) -> Standard:
        """Return the standard of weights of ``bits`` bits, before the weights are measured."""
        return cls(confidence=confidence, by="likelihood", bits=bits)

    def measured(self, results: Sequence[Comparison]) -> Standard:
        """Return the standard with its weights' agreement; raises InputError if the weights change the model too much."""
        kl = float(np.mean([value for each in results for value in each.kl]))
        if not kl < math.log(2):
            raise InputError(
                f"Weights of {self.bits} bits are {kl:.2f} nats from this model's own answers: nothing to be as near as. "
                "Give more bits, or an agreement."
            )
        return replace(self, agreement=min(math.exp(-kl), math.nextafter(1, 0)))

    def scored(self, scores: Sequence[float]) -> Standard:
        """Return the standard with full recompute's mean score; raises InputError if the score is too low to lose anything."""
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
        """Return the number of prompts without common chunks that show that the standard holds, if no prompt loses anything."""
        if self.by == "likelihood":
            return MIN_RESAMPLED
        return math.ceil(math.log(1 - self.confidence) / math.log(self.agreement))

    @property
    def usual(self) -> int:
        """Return the number of prompts to calibrate on: among only :attr:`needed` a single wrong answer decides by luck."""
        return max(_FEWEST, 2 * self.needed)

    @property
    def most_kl(self) -> float:
        """Return the mean KL, in nats, at which exp(-KL) is the agreement."""
        return -math.log(self.agreement)

    def bounds(self, results: Sequence[Result]) -> Bounds:
        """Return the agreement of a blend with its bounds."""
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
            # Questions without any loss show no more than this about the share of questions without a loss.
            most = (1 - self.confidence) ** (1 / len(set(groups)))
            return Bounds(mean, max(0.0, min(low, most)), min(high, 2.0))
        low, high = mean_bounds(values, groups, self.confidence)
        return Bounds(math.exp(-mean), math.exp(-high), math.exp(-low))

    def shown_by(self, results: Sequence[Result]) -> bool:
        """Return whether these prompts show that the agreement holds."""
        return len({group for group, _ in results}) >= self.needed and self.bounds(results).low >= self.agreement

    def supported_by(self, results: Sequence[Result]) -> bool:
        """Return whether the agreement and, without a metric, the KL hold on these prompts; KL tells more when tokens are few."""
        if self.bounds(results).value < self.agreement:
            return False
        kl = float(np.mean([value for _, compared in results for value in compared.kl]))
        return self.metric is not None or kl <= self.most_kl

    def within_reach(self, results: Sequence[Result], groups: Sequence[str]) -> bool:
        """Return whether a blend could still hold if it agreed fully on all prompts that were not tried.

        For standards other than by tokens, a blend is given up earlier: when the tried prompts make it likely that the
        blend does not hold.

        Args:
            results: Results of the tried prompts.
            groups: Groups of the other prompts.
        """
        tokens = round(float(np.mean([len(compared.kl) for _, compared in results])))
        ideal = Comparison((True,) * tokens, (0.0,) * tokens, 0.0)
        whole = [*results, *((group, ideal) for group in groups)]
        if self.by != "tokens" and self._speaks_against(results):
            return False
        enough = len({group for group, _ in whole}) >= self.needed
        if not enough or self.by != "tokens":
            # No bound is used here: it says little while nearly all values are zero.
            return self.supported_by(whole)
        return self.bounds(whole).low >= self.agreement

    def _speaks_against(self, results: Sequence[Result]) -> bool:
        """Return whether the mean KL or loss of prompts is above the limit, by a one-sided t bound with 80% confidence.

        A blend that is given up wrongly is followed by a blend that recomputes more, so that the error is on the safe
        side.
        """
        groups, harms = [group for group, _ in results], [float(np.mean(compared.kl)) for _, compared in results]
        if self.metric:
            harms = [compared.loss for _, compared in results]
        limit = 1 - self.agreement if self.metric else self.most_kl
        return len(harms) >= _FEW and mean_t_bounds(harms, groups, _DOUBTS)[0] > limit
