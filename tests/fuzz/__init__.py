"""Inputs that nobody has thought of. `make test` runs some, always the same; `make fuzz` runs many, always others."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("CACHEBLEND_FUZZ", "0"))
"""How many times as many examples as `make test` runs; 0 there."""


def examples(number: int) -> settings:
    """Return hypothesis's settings for a test that tries so many inputs in CI."""
    return settings(
        max_examples=number * max(1, FACTOR),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
    )
