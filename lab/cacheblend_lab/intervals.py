"""Computes 95% intervals of shares, means and quantiles; none for a sample that is too small or too uniform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cacheblend_rag.calibrate.intervals import Floats, Interval, by_group, draws, independent_values

CONFIDENCE: Final = 0.95
MIN_GROUPS: Final = 8
"""Minimum number of groups; with fewer groups each value counts on its own."""
MIN_VALUES: Final = 5
"""Minimum number of values for a bootstrap interval; resampling fewer values says nothing."""


def share_interval(values: Sequence[float], groups: Sequence[str]) -> Interval:
    """Return the Clopper-Pearson interval of the mean of ``values``, each 0 or 1, counting independent values.

    Values of one group (questions about the same chunks) are not independent. The number of independent values is the
    number that would have a mean of this variance (Korn and Graubard, 1998). All-equal values show no variance, so that
    each group counts once. A value with an empty group name is a group of its own. With fewer than :data:`MIN_GROUPS`
    groups each value counts on its own, and the interval is only a lower bound of the uncertainty.
    """
    from scipy.stats import beta

    sums, counts = by_group(values, groups)
    total, share = float(counts.sum()), float(sums.sum() / counts.sum())
    if len(sums) >= MIN_GROUPS:
        total = min(total, independent_values(sums, counts, share))
    successes, tail = share * total, (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, successes, total - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, total - successes)) if share < 1 else 1.0
    return low, high


def mean_interval(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> Interval | None:
    """Return the bootstrap interval of the mean of ``values``, resampling whole groups; see :func:`share_interval`.

    Return None for fewer than :data:`MIN_VALUES` values, and for values that are all equal.
    """
    if len(values) < MIN_VALUES:
        return None
    sums, counts = by_group(values, groups)
    if len(sums) < MIN_GROUPS:
        sums, counts = np.asarray(values, np.float64), np.ones(len(values))
    drawn = draws(len(sums), seed)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return _quantiles(means)


def quantile_interval(values: Sequence[float], seed: int = 0, quantile: float = 0.5) -> Interval | None:
    """Return the bootstrap interval of a quantile of ``values``; None as in :func:`mean_interval`."""
    if len(values) < MIN_VALUES:
        return None
    array = np.asarray(values, np.float64)
    return _quantiles(np.quantile(array[draws(len(array), seed)], quantile, axis=1))


def _quantiles(values: Floats) -> Interval | None:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return (float(low), float(high)) if low < high else None
