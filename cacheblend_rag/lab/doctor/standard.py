"""Says when a blend is good enough: the bound that must hold, and how many prompts it takes to show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.compared import Comparison
from cacheblend_rag.lab.stats.intervals import mean_bounds, share_bounds

MIN_RESAMPLED: Final = 20
"""Resampling fewer prompts says too little about a mean that a few of them dominate, as that of KL."""

_FEWEST: Final = 12
"""Prompts of a calibration by a standard that fewer would show, too."""

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
            exp(-KL), the share of a token's probability that is kept, in the geometric mean.

    Raises:
        InputError: A value that is no share, or that nothing could show.
    """

    agreement: float = 0.99
    confidence: float = 0.95
    by: Literal["tokens", "likelihood"] = "tokens"

    def __post_init__(self) -> None:
        """Refuse what nothing could reach."""
        for name in ("agreement", "confidence"):
            if not 0.5 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a share from 0.5 to below 1, such as 0.99.")

    @property
    def needed(self) -> int:
        """Return how many prompts without common chunks it takes to show that it holds, if no token disagrees."""
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
            found = compared.kl if self.by == "likelihood" else compared.agrees
            values += [float(value) for value in found]
            groups += [group] * len(found)
        mean = float(np.mean(values))
        if self.by == "tokens":
            return Bounds(mean, *share_bounds(values, groups, self.confidence))
        low, high = mean_bounds(values, groups, self.confidence)
        return Bounds(math.exp(-mean), math.exp(-high), math.exp(-low))

    def shown_by(self, results: Sequence[Result]) -> bool:
        """Say whether these prompts show that the agreement holds."""
        return len({group for group, _ in results}) >= self.needed and self.bounds(results).low >= self.agreement

    def supported_by(self, results: Sequence[Result]) -> bool:
        """Say whether it holds on these prompts, shown or not: agreement, and KL, which tells more where tokens are few."""
        if self.bounds(results).value < self.agreement:
            return False
        return float(np.mean([value for _, compared in results for value in compared.kl])) <= self.most_kl

    def within_reach(self, results: Sequence[Result], groups: Sequence[str]) -> bool:
        """Say whether a blend could still hold, if it agreed wholly on all prompts that it was not tried on.

        Args:
            results: What was measured.
            groups: The groups of the other prompts.
        """
        tokens = round(float(np.mean([len(compared.kl) for _, compared in results])))
        ideal = Comparison((True,) * tokens, (0.0,) * tokens, 0.0)
        whole = [*results, *((group, ideal) for group in groups)]
        enough = len({group for group, _ in whole}) >= self.needed
        if not enough or self.by == "likelihood":
            # Resampling is no help here: it says little while nearly all values are zero.
            return self.supported_by(whole)
        return self.bounds(whole).low >= self.agreement
