"""Means, medians and differences with 95% bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
MIN_GROUPS: Final = 8
"""With fewer groups their resampling says nothing: values are resampled one by one."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


def mean_interval(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap interval of the mean of ``values``, resampling whole groups.

    Values of one group (questions about the same chunks) are not independent; resampling them one by one would make the
    interval too narrow. An empty group name is a group of its own. With fewer than :data:`MIN_GROUPS` groups values are
    resampled one by one all the same, and the interval is only a lower bound of the uncertainty.
    """
    sums, counts = _by_group(values, groups)
    if len(sums) < MIN_GROUPS:
        sums, counts = np.asarray(values, np.float64), np.ones(len(values))
    draws = _draws(len(sums), seed)
    means = sums[draws].sum(1) / counts[draws].sum(1)
    return _quantiles(means)


def median_interval(values: Sequence[float], seed: int = 0, quantile: float = 0.5) -> tuple[float, float]:
    """Return the bootstrap interval of a quantile of ``values``."""
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


def _draws(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _quantiles(values: Floats) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)
