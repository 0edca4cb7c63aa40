"""Computes 95% intervals of shares, means and quantiles; none for a sample that is too small or too uniform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
MIN_GROUPS: Final = 8
"""Minimum number of groups; with fewer groups each value counts on its own."""
MIN_VALUES: Final = 5
"""Minimum number of values for a bootstrap interval; resampling fewer values says nothing."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Interval = tuple[float, float]


def share_interval(values: Sequence[float], groups: Sequence[str]) -> Interval:
    """Return the Clopper-Pearson interval of the mean of ``values``, each 0 or 1, counting independent values.

    Values of one group (questions about the same chunks) are not independent. The number of independent values is the
    number that would have a mean of this variance (Korn and Graubard, 1998). All-equal values show no variance, so that
    each group counts once. A value with an empty group name is a group of its own. With fewer than :data:`MIN_GROUPS`
    groups each value counts on its own, and the interval is only a lower bound of the uncertainty.
    """
    from scipy.stats import beta

    sums, counts = _by_group(values, groups)
    total, share = float(counts.sum()), float(sums.sum() / counts.sum())
    if len(sums) >= MIN_GROUPS:
        total = min(total, _independent(sums, counts, share))
    successes, tail = share * total, (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, successes, total - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, total - successes)) if share < 1 else 1.0
    return low, high


def share_bounds(values: Sequence[float], groups: Sequence[str], confidence: float) -> Interval:
    """Return a lower and an upper bound of the mean of ``values``, each 0 or 1; each bound holds with ``confidence``.

    The bounds are computed as in :func:`share_interval`. The lower bound is at most the bound of values with no 0 at
    all, each group counting once: a few 0 say too little about how much the values of one group depend on each other.
    """
    from scipy.stats import beta

    sums, counts = _by_group(values, groups)
    share = float(sums.sum() / counts.sum())
    best = float((1 - confidence) ** (1 / len(sums)))
    if share == 1:
        return best, 1.0
    total = min(float(counts.sum()), _independent(sums, counts, share))
    successes = share * total
    low = float(beta.ppf(1 - confidence, successes, total - successes + 1)) if successes else 0.0
    return min(low, best), float(beta.ppf(confidence, successes + 1, total - successes))


def mean_bounds(values: Sequence[float], groups: Sequence[str], confidence: float, seed: int = 0) -> Interval:
    """Return a lower and an upper bound of the mean of ``values`` by resampling groups; each bound holds with ``confidence``."""
    sums, counts = _by_group(values, groups)
    draws = _draws(len(sums), seed)
    low, high = np.quantile(sums[draws].sum(1) / counts[draws].sum(1), (1 - confidence, confidence))
    return float(low), float(high)


def mean_t_bounds(values: Sequence[float], groups: Sequence[str], confidence: float) -> Interval:
    """Return a lower and an upper bound of the mean of ``values`` by Student's t over groups; each holds with ``confidence``."""
    from scipy.stats import t

    sums, counts = _by_group(values, groups)
    mean, number = float(sums.sum() / counts.sum()), len(sums)
    if number < 2:
        return -math.inf, math.inf
    error = math.sqrt(float(np.square(sums - mean * counts).sum()) * number / (number - 1)) / float(counts.sum())
    reach = float(t.ppf(confidence, number - 1)) * error
    return mean - reach, mean + reach


def mean_interval(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> Interval | None:
    """Return the bootstrap interval of the mean of ``values``, resampling whole groups; see :func:`share_interval`.

    Return None for fewer than :data:`MIN_VALUES` values, and for values that are all equal.
    """
    if len(values) < MIN_VALUES:
        return None
    sums, counts = _by_group(values, groups)
    if len(sums) < MIN_GROUPS:
        sums, counts = np.asarray(values, np.float64), np.ones(len(values))
    draws = _draws(len(sums), seed)
    means = sums[draws].sum(1) / counts[draws].sum(1)
    return _quantiles(means)


def quantile_interval(values: Sequence[float], seed: int = 0, quantile: float = 0.5) -> Interval | None:
    """Return the bootstrap interval of a quantile of ``values``; None as in :func:`mean_interval`."""
    if len(values) < MIN_VALUES:
        return None
    array = np.asarray(values, np.float64)
    return _quantiles(np.quantile(array[_draws(len(array), seed)], quantile, axis=1))


def _by_group(values: Sequence[float], groups: Sequence[str]) -> tuple[Floats, Floats]:
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


def _independent(sums: Floats, counts: Floats, share: float) -> float:
    """Return the number of independent values that the grouped values are worth."""
    if share in (0, 1):
        return len(sums)
    spread = float(np.square(sums - share * counts).sum())
    return float(share * (1 - share) * counts.sum() ** 2 / spread) if spread else float("inf")


def _draws(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _quantiles(values: Floats) -> Interval | None:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return (float(low), float(high)) if low < high else None
