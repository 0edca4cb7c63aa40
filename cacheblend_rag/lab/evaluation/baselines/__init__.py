"""Answers in the ways that a blend is compared with (paper section 7): settings of an engine, or chunk by chunk."""

from __future__ import annotations

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING
from cacheblend_rag.lab.evaluation.baselines.chunkwise import ChunkwiseAnswer, MapReduce, MapRerank

__all__ = [
    "FULL_RECOMPUTE",
    "FULL_REUSE",
    "PREFIX_CACHING",
    "ChunkwiseAnswer",
    "MapReduce",
    "MapRerank",
]
