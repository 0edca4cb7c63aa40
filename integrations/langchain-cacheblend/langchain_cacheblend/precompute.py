"""Precomputes the KV of chunks."""

from __future__ import annotations

import warnings

from cacheblend_rag import BlendEngine, CacheBlendError, Chunk, PrecomputeReport


def precompute(engine: BlendEngine, chunks: list[Chunk]) -> PrecomputeReport:
    """Compute and store the chunks' KV; warn if KV cannot be stored, because a prompt computes missing KV itself."""
    try:
        report = engine.precompute(chunks)
    except CacheBlendError as error:
        warnings.warn(f"The KV of {len(chunks)} chunks was not precomputed: {error}", stacklevel=3)
        return PrecomputeReport(failed={chunk.id: str(error) for chunk in chunks})
    if report.failed:
        reason = next(iter(report.failed.values()))
        warnings.warn(f"The KV of {len(report.failed)} of {len(chunks)} chunks is not stored: {reason}", stacklevel=3)
    return report
