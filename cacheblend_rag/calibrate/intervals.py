"""Bounds shares and means of grouped values: prompts about the same chunks are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_RESAMPLES = 2000

Floats = np.ndarray[Any, np.dtype[np.float64]]
Interval = tuple[float, float]


def share_bounds(values: Sequence[float], groups: Sequence[str], confidence: float) -> Interval:
    """Return a lower and an upper bound of the mean of ``values``, each 0 or 1; each bound holds with ``confidence``.

    The bounds are those of Clopper and Pearson, with the number of independent values that would have a mean of this
    variance (Korn and Graubard, 1998). The lower bound is at most the bound of values with no 0 at all, each group
    counting once: a few 0 say too little about how much the values of one group depend on each other.
    """
    from scipy.stats import beta

    sums, counts = by_group(values, groups)
    share = float(sums.sum() / counts.sum())
    best = float((1 - confidence) ** (1 / len(sums)))
    if share == 1:
        return best, 1.0
    total = min(float(counts.sum()), independent_values(sums, counts, share))
    successes = share * total
    low = float(beta.ppf(1 - confidence, successes, total - successes + 1)) if successes else 0.0
    return min(low, best), float(beta.ppf(confidence, successes + 1, total - successes))


def mean_bounds(values: Sequence[float], groups: Sequence[str], confidence: float, seed: int = 0) -> Interval:
    """Return a lower and an upper bound of the mean of ``values`` by resampling groups; each bound holds with ``confidence``."""
    sums, counts = by_group(values, groups)
    drawn = draws(len(sums), seed)
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (1 - confidence, confidence))
    return float(low), float(high)


def mean_t_bounds(values: Sequence[float], groups: Sequence[str], confidence: float) -> Interval:
    """Return a lower and an upper bound of the mean of ``values`` by Student's t over groups; each holds with ``confidence``."""
    from scipy.stats import t

    sums, counts = by_group(values, groups)
    mean, number = float(sums.sum() / counts.sum()), len(sums)
    if number < 2:
        return -math.inf, math.inf
    error = math.sqrt(float(np.square(sums - mean * counts).sum()) * number / (number - 1)) / float(counts.sum())
    reach = float(t.ppf(confidence, number - 1)) * error
    return mean - reach, mean + reach


def by_group(values: Sequence[float], groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Return sum and number of each group's values; a value with an empty group name is a group of its own."""
    index: dict[str, int] = {}
    sums: list[float] = []
    counts: list[float] = []
    for number, (value, group) in enumerate(zip(values, groups, strict=True)):
        at = index.setdefault(group or f"\0{number}", len(sums))
        if at == len(sums):
            sums.append(0.0)
            counts.append(0.0)
        sums[at] += value
        counts[at] += 1
    return np.array(sums), np.array(counts)


def independent_values(sums: Floats, counts: Floats, share: float) -> float:
    """Return the number of independent values that the grouped values are worth."""
    if share in (0, 1):
        return len(sums)
    spread = float(np.square(sums - share * counts).sum())
    return float(share * (1 - share) * counts.sum() ** 2 / spread) if spread else float("inf")


def draws(count: int, seed: int) -> Any:
    """Return the indices ``[resamples, count]`` of a bootstrap over ``count`` groups."""
    return np.random.default_rng(seed).integers(count, size=(_RESAMPLES, count))
