"""Reports requests to OpenTelemetry as spans, through the global tracer of OpenTelemetry's API.

Without an SDK no span is recorded, and a span costs microseconds. Without the API's package no spans are created. Spans
hold numbers, names of tiers and policies, and reasons that this library words: no text of a document, a prompt, an
answer or an error message.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

try:
    from opentelemetry import context, propagate, trace
except ImportError:  # for example in an image with torch and transformers only
    _told = False
else:
    _told = True
    _tracer = trace.get_tracer("cacheblend_rag")  # finds the provider even if a provider is set later

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

Side = Literal["internal", "client", "server"]
"""Kind of a span: work inside a process, or the client's or the server's side of a request between two processes."""
_T = TypeVar("_T")
_END: Any = object()


class _Silent:
    """Replaces a span if OpenTelemetry's API is not installed."""

    def is_recording(self) -> bool:
        """Return False."""
        return False

    def end(self, *_: Any) -> None:
        """Do nothing."""

    set_attribute = set_attributes = end


def begin(name: str, side: Side = "internal", parent: Context | None = None, begun: float | None = None) -> Span:
    """Begin a span with a name such as ``cacheblend.generate``, as a child of ``parent`` (None: of the current span).

    ``begun`` is the start time by ``time.perf_counter``; None means now.
    """
    if not _told:
        return cast("Span", _Silent())
    kind = trace.SpanKind[side.upper()]
    return _tracer.start_span(name, parent, kind, start_time=None if begun is None else _since_epoch(begun))


def part(of: Span, name: str, begun: float, ended: float, **attributes: Any) -> Span:
    """Add a child of the span ``of`` that ran from ``begun`` to ``ended`` (``time.perf_counter``); return the child."""
    made = begin(name, parent=trace.set_span_in_context(of) if _told else None, begun=begun)
    made.set_attributes(attributes)
    made.end(_since_epoch(ended))
    return made


@contextmanager
def span(name: str) -> Iterator[Span]:
    """Run a ``with`` block inside a new span."""
    made = begin(name)
    with current(made):
        yield made
    made.end()


@contextmanager
def current(of: Span) -> Iterator[None]:
    """Make a span current during a ``with`` block. An error ends and marks the span, without the error's message."""
    try:
        with _inside(of):
            yield
    except BaseException as error:
        failed(of, error)
        of.end()
        raise


@contextmanager
def _inside(of: Span) -> Iterator[None]:
    if not _told:
        yield
        return
    token = context.attach(trace.set_span_in_context(of))
    try:
        yield
    finally:
        context.detach(token)


def failed(of: Span, error: BaseException) -> None:
    """Record an error's class on a span. GeneratorExit and cancellation do not set the error status."""
    name = type(error).__name__
    of.set_attribute("error.type", name)
    if _told and isinstance(error, Exception):
        of.set_status(trace.Status(trace.StatusCode.ERROR, name))


def recording() -> bool:
    """Return whether the current span is being recorded."""
    return _told and trace.get_current_span().is_recording()


def headers(of: Span | None = None) -> dict[str, str]:
    """Return the HTTP headers that make another process's spans children of ``of`` (None: of the current span).

    The headers are W3C's ``traceparent`` and ``tracestate``, or those that ``OTEL_PROPAGATORS`` selects. Without a
    trace the result is empty.
    """
    carrier: dict[str, str] = {}
    if _told:
        propagate.inject(carrier, None if of is None else trace.set_span_in_context(of))
    return carrier


def within(of: Span, items: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield ``items`` with the span current while each item is produced, not while it is used; end the span last."""
    try:
        while True:
            with _inside(of):
                item = next(items, _END)
            if item is _END:
                return
            yield item
    except BaseException as error:
        failed(of, error)
        raise
    finally:
        if isinstance(items, Generator):
            items.close()
        of.end()


async def awithin(of: Span, items: AsyncIterator[_T]) -> AsyncGenerator[_T, None]:
    """Yield the items of an asynchronous iterator as :func:`within` does."""
    try:
        while True:
            with _inside(of):
                item = await anext(items, _END)
            if item is _END:
                return
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
