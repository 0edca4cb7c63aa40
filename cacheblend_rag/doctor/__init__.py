"""What `cacheblend doctor` finds out about a model on a machine, and the calibration of its blend settings."""

from __future__ import annotations

from cacheblend_rag.doctor.calibration import calibrate_engine

__all__ = ["calibrate_engine"]
