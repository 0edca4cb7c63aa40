"""Spans around streams, and what they cost where nobody records them."""

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


def test_what_a_stream_does_is_part_of_its_span_and_what_its_reader_does_is_not(kept) -> None:
    for _ in spans.within(spans.begin("stream"), made_inside(["first", "second"])):
        with spans.span("reader"):
            pass
    found = tree(kept.get_finished_spans())
    assert found["stream"] == {"first", "second"}
    assert all("reader" not in parts for parts in found.values())


async def test_the_same_holds_of_asynchronous_streams(kept) -> None:
    async def items() -> AsyncIterator[str]:
        for name in made_inside(["first", "second"]):
            yield name

    async for _ in spans.awithin(spans.begin("stream"), items()):
        with spans.span("reader"):
            pass
    found = tree(kept.get_finished_spans())
    assert found["stream"] == {"first", "second"}
    assert all("reader" not in parts for parts in found.values())


def test_an_error_marks_its_span_and_its_message_is_not_told(kept) -> None:
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


def test_without_an_sdk_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_tracer", trace.NoOpTracer())
    with RequestSpans("default") as request:
        assert request.trace is None
        assert request.headers == {}


def test_a_context_that_came_from_elsewhere_is_handed_on_even_without_an_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import context, propagate

    monkeypatch.setattr(spans, "_tracer", trace.NoOpTracer())
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    token = context.attach(propagate.extract({"traceparent": parent}))
    try:
        with RequestSpans("default") as request:
            assert request.headers == {"traceparent": parent}
    finally:
        context.detach(token)
