"""What `cacheblend doctor` finds out about a model on a machine, and the calibration of its blend settings."""

from __future__ import annotations

from cacheblend_rag.doctor.calibrate import calibrate_engine
from cacheblend_rag.doctor.calibration_prompts import collect_prompts

__all__ = ["calibrate_engine", "collect_prompts"]
