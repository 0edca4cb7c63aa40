"""Tests spans around streams, with and without a recording SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry import trace

from cacheblend_rag import spans
from cacheblend_rag.engines.spans import RequestSpans
from tests.recorded_spans import exporter, said, tree


@pytest.fixture
def kept():
    kept = exporter()
    kept.clear()
    yield kept
    kept.clear()


def made_inside(names: list[str]) -> Iterator[str]:
    for name in names:
        with spans.span(name):
            yield name


def test_spans_made_by_a_stream_are_its_children_and_spans_of_its_reader_are_not(kept) -> None:
    for _ in spans.within(spans.begin("stream"), made_inside(["first", "second"])):
        with spans.span("reader"):
            pass
    found = tree(kept.get_finished_spans())
    assert found["stream"] == {"first", "second"}
    assert all("reader" not in parts for parts in found.values())


async def test_spans_made_by_an_asynchronous_stream_are_its_children(kept) -> None:
    async def items() -> AsyncIterator[str]:
        for name in made_inside(["first", "second"]):
            yield name

    async for _ in spans.awithin(spans.begin("stream"), items()):
        with spans.span("reader"):
            pass
    found = tree(kept.get_finished_spans())
    assert found["stream"] == {"first", "second"}
    assert all("reader" not in parts for parts in found.values())


def test_an_error_marks_its_span_without_its_message(kept) -> None:
    def failing() -> Iterator[str]:
        yield "one"
        raise ValueError("what the document says")

    with pytest.raises(ValueError, match="document"):
        list(spans.within(spans.begin("stream"), failing()))
    with pytest.raises(KeyError), spans.span("block"):
        raise KeyError("what the document says")
    with pytest.raises(ValueError, match="document"), RequestSpans("default"):
        raise ValueError("what the document says")
    ended = kept.get_finished_spans()
    assert {(span.name, span.status.is_ok, span.attributes["error.type"]) for span in ended} == {
        ("stream", False, "ValueError"),
        ("block", False, "KeyError"),
        ("cacheblend.generate", False, "ValueError"),
    }
    assert "what the document says" not in said(ended)


def test_no_span_is_recorded_without_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_tracer", trace.NoOpTracer())
    with RequestSpans("default") as request:
        assert request.trace is None
        assert request.headers == {}


def test_a_foreign_trace_context_is_passed_on_without_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import context, propagate

    monkeypatch.setattr(spans, "_tracer", trace.NoOpTracer())
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    token = context.attach(propagate.extract({"traceparent": parent}))
    try:
        with RequestSpans("default") as request:
            assert request.headers == {"traceparent": parent}
    finally:
        context.detach(token)
