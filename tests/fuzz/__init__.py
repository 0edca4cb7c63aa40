"""Tries random inputs. `make test` runs a fixed small set of inputs; `make fuzz` runs many new inputs each time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("CACHEBLEND_FUZZ", "0"))
"""The factor by which `make fuzz` runs more examples than `make test`, which sets 0."""


def examples(number: int) -> settings:
    """Return hypothesis's settings for a test that tries ``number`` inputs in CI."""
    return settings(
        max_examples=number * max(1, FACTOR),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
    )
