"""The paper's baselines that are settings of one engine (paper section 7)."""

from __future__ import annotations

from cacheblend_rag.engines.base import BlendSettings

FULL_RECOMPUTE = BlendSettings(reuse="nothing")
PREFIX_CACHING = BlendSettings(reuse="prefix")
FULL_REUSE = BlendSettings(0.0, "none")
