"""Records spans in memory: the process has one tracer provider, so all tests share it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@cache
def exporter() -> InMemorySpanExporter:
    """Record all spans of this process from now on."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    assert trace.get_tracer_provider() is provider
    return kept


def tree(spans: Iterable[ReadableSpan]) -> dict[str, set[str]]:
    """Return the names of spans, each with the names of its parts."""
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    found: dict[str, set[str]] = {span.name: set() for span in by_id.values()}
    for span in by_id.values():
        if span.parent is not None and span.parent.span_id in by_id:
            found[by_id[span.parent.span_id].name].add(span.name)
    return found


def said(spans: Iterable[ReadableSpan]) -> str:
    """Return the text of spans, as they are exported."""
    return "\n".join(span.to_json() for span in spans)


def named(spans: Iterable[ReadableSpan], name: str) -> dict[str, Any]:
    """Return the attributes of the only span with a name."""
    (found,) = (span for span in spans if span.name == name)
    return dict(found.attributes or {})
