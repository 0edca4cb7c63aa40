"""What a blend is compared with (paper section 7): settings of one engine, and two ways to ask chunk by chunk."""

from __future__ import annotations

from cacheblend_rag.baselines.chunkwise import ChunkwiseAnswer, MapReduce, MapRerank
from cacheblend_rag.baselines.settings import FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING

__all__ = ["FULL_RECOMPUTE", "FULL_REUSE", "PREFIX_CACHING", "ChunkwiseAnswer", "MapReduce", "MapRerank"]
