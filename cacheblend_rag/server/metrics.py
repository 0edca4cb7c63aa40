"""Prometheus metrics of reuse, beside vLLM's own on ``/metrics``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from cacheblend_rag.engines.results import PrecomputeReport
    from cacheblend_rag.protocol import ReuseReport

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NUMBERS = re.compile(r"\d+")


class ReuseMetrics:
    """Counts what finished requests and precomputation report."""

    def __init__(self, registry: CollectorRegistry = REGISTRY):
        """Register the metrics; once per registry."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cacheblend_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"cacheblend_{name}", text, buckets=_SECONDS, registry=registry)

        self._requests = counter("requests", "Finished prompts by mode.", "mode")
        self._reused = counter("reused_tokens", "Prompt tokens whose stored KV was used as it is.")
        self._recomputed = counter("recomputed_tokens", "Prompt tokens with stored KV that were recomputed.")
        self._computed = counter("computed_tokens", "Prompt tokens that went through all layers.")
        self._loaded = counter("loaded_tokens", "Prompt tokens whose KV was loaded from the store.")
        self._bytes = counter("loaded_bytes", "Bytes of KV loaded from the store.")
        self._tier_bytes = counter("tier_loaded_bytes", "Bytes of KV loaded, by the tier that they came from.", "tier")
        self._tier_seconds = counter(
            "tier_read_seconds", "Seconds that reads of chunks took, each chunk's added up.", "tier"
        )
        self._missing = counter("missing_chunks", "Chunks in prompts without stored KV.")
        self._fallbacks = counter("fallbacks", "Prompts served by ordinary prefill, by reason.", "reason")
        self._blend = seconds("blend_seconds", "Placement and both passes of a blended prompt.")
        self._load = seconds("load_wait_seconds", "Time a blended prompt waited for stored KV.")
        self._precomputed = counter("precomputed_chunks", "Chunks given to precompute, by result.", "result")
        self._precomputed_tokens = counter("precomputed_tokens", "Tokens whose KV was computed by precompute.")

    def finished(self, report: ReuseReport) -> None:
        """Count a finished prompt."""
        self._requests.labels(report.mode).inc()
        self._reused.inc(report.reused_tokens)
        self._recomputed.inc(report.recomputed_tokens)
        self._computed.inc(report.computed_tokens)
        self._missing.inc(len(report.missing))
        if report.mode == "prefill":
            self._fallbacks.labels(reason_label(report.reason)).inc()
            return
        if report.loaded_bytes:
            self._loaded.inc(report.reused_tokens + report.recomputed_tokens)
            self._bytes.inc(report.loaded_bytes)
        for load in report.loads:
            self._tier_bytes.labels(load.tier).inc(load.nbytes)
            self._tier_seconds.labels(load.tier).inc(load.seconds)
        self._blend.observe(report.blend_s)
        self._load.observe(report.load_s)

    def precomputed(self, report: PrecomputeReport) -> None:
        """Count a precompute call."""
        self._precomputed.labels("computed").inc(report.computed)
        self._precomputed.labels("present").inc(report.present)
        self._precomputed.labels("failed").inc(len(report.failed))
        self._precomputed_tokens.inc(report.tokens)


def reason_label(reason: str) -> str:
    """Return a reason without what differs from prompt to prompt: a label must take few values."""
    return _NUMBERS.sub("N", reason.partition(":")[0])[:80]
