"""Measures OpenTelemetry's overhead on a request without an SDK: all the spans of a question over an index.

python lab/benchmarks/tracing_overhead.py
"""

from __future__ import annotations

import timeit

from cacheblend_rag import spans
from cacheblend_rag.engines.spans import RequestSpans

REQUESTS = 20_000


def request() -> None:
    """Open the spans that `RagPipeline.ask` and an engine open, without the work inside."""
    asked = spans.begin("cacheblend.ask")
    with spans.current(asked), spans.span("cacheblend.retrieve") as told:
        told.set_attribute("cacheblend.hits", 6)
    for _ in spans.within(asked, answer()):
        pass


def answer():
    with RequestSpans("default") as request:
        yield 1
        assert request.trace is None


def main() -> None:
    """Measure and print the best of five runs."""
    seconds = min(timeit.repeat(request, number=REQUESTS, repeat=5)) / REQUESTS
    print(f"{1e6 * seconds:.1f} µs a request")


if __name__ == "__main__":
    main()
