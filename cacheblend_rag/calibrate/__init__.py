"""Calibration of a model: check layers and recompute ratio, measured on a few prompts. See :mod:`.rules` for how."""

from __future__ import annotations

from cacheblend_rag.calibrate.prompts import collect_prompts
from cacheblend_rag.calibrate.rules import Calibration, LayerAgreement, calibrate
from cacheblend_rag.calibrate.run import calibrate_engine

__all__ = ["Calibration", "LayerAgreement", "calibrate", "calibrate_engine", "collect_prompts"]
