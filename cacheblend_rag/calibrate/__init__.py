"""Measures how a model performs on a machine, and calibrates its blend settings."""

from __future__ import annotations

from cacheblend_rag.calibrate.calibration import calibrate_engine

__all__ = ["calibrate_engine"]
