"""Tells OpenTelemetry of a request: spans, through the API's global tracer.

Where no SDK is set up nothing is recorded, and a span costs microseconds. None holds what a document, a prompt, an answer or an
error says: they have numbers, names of tiers and policies, and reasons in our own words.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

_T = TypeVar("_T")
_tracer = trace.get_tracer("cacheblend_rag")  # finds the provider when one is set, be that before or after


def begin(
    name: str, kind: SpanKind = SpanKind.INTERNAL, parent: Context | None = None, begun: float | None = None
) -> Span:
    """Begin a span.

    Args:
        name: As ``cacheblend.generate``.
        kind: Whether it is a client's or a server's side of a request.
        parent: None takes the span that is current.
        begun: When it began, by ``time.perf_counter``; None is now.
    """
    return _tracer.start_span(name, parent, kind, start_time=None if begun is None else _since_epoch(begun))


def part(of: Span, name: str, begun: float, ended: float, **attributes: Any) -> Span:
    """Add a span of what ran from ``begun`` to ``ended``, by ``time.perf_counter``, as a part of another; return it."""
    made = begin(name, parent=trace.set_span_in_context(of), begun=begun)
    made.set_attributes(attributes)
    made.end(_since_epoch(ended))
    return made


@contextmanager
def span(name: str) -> Iterator[Span]:
    """Have a span for what runs inside."""
    made = begin(name)
    with current(made):
        yield made
    made.end()


@contextmanager
def current(of: Span) -> Iterator[None]:
    """Have a span be current for what runs inside; an error ends it, marked, but without its message."""
    try:
        with trace.use_span(of, record_exception=False, set_status_on_exception=False):
            yield
    except BaseException as error:
        failed(of, error)
        of.end()
        raise


def failed(of: Span, error: BaseException) -> None:
    """Note how a span ended. That the reader of a stream went away is no error."""
    name = type(error).__name__
    of.set_attribute("error.type", name)
    if isinstance(error, Exception):
        of.set_status(Status(StatusCode.ERROR, name))


def recording() -> bool:
    """Say whether anybody records the span that is current."""
    return trace.get_current_span().is_recording()


def headers(of: Span | None = None) -> dict[str, str]:
    """Return the headers that let another process's spans be parts of this one, or of the one that is current.

    They are W3C's ``traceparent`` and ``tracestate``, or what ``OTEL_PROPAGATORS`` says; none without a trace.
    """
    carrier: dict[str, str] = {}
    propagate.inject(carrier, None if of is None else trace.set_span_in_context(of))
    return carrier


def within(of: Span, items: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield ``items`` with a span being current while each is made, and not while it is used; the span ends behind them."""
    inside = trace.set_span_in_context(of)
    try:
        while True:
            token = context.attach(inside)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                context.detach(token)
            yield item
    except BaseException as error:
        failed(of, error)
        raise
    finally:
        if isinstance(items, Generator):
            items.close()
        of.end()


async def awithin(of: Span, items: AsyncIterator[_T]) -> AsyncGenerator[_T, None]:
    """Do the same for an asynchronous iterator."""
    inside = trace.set_span_in_context(of)
    try:
        while True:
            token = context.attach(inside)
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
            finally:
                context.detach(token)
            yield item
    except BaseException as error:
        failed(of, error)
        raise
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
        of.end()


def _since_epoch(at: float) -> int:
    """Return a time by ``time.perf_counter`` in nanoseconds since the epoch."""
    return time.time_ns() - round(1e9 * (time.perf_counter() - at))
