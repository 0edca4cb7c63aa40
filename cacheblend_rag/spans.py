"""Tells OpenTelemetry of a request: spans, through the API's global tracer.

Where no SDK is set up nothing is recorded, and a span costs microseconds; without the API's package there are none. None
holds what a document, a prompt, an answer or an error says: they have numbers, names of tiers and policies, and reasons in our
own words.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

try:
    from opentelemetry import context, propagate, trace
except ImportError:  # a bare image of torch and transformers
    _told = False
else:
    _told = True
    _tracer = trace.get_tracer("cacheblend_rag")  # finds the provider when one is set, be that before or after

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

Side = Literal["internal", "client", "server"]
"""Which side of a request a span is: of one within a process, or of one between two."""
_T = TypeVar("_T")
_END: Any = object()


class _Silent:
    """Stands for a span where the API is missing."""

    def is_recording(self) -> bool:
        """Return False."""
        return False

    def end(self, *_: Any) -> None:
        """Do nothing."""

    set_attribute = set_attributes = end


def begin(name: str, side: Side = "internal", parent: Context | None = None, begun: float | None = None) -> Span:
    """Begin a span, called as ``cacheblend.generate``, as a part of ``parent``, by default of the span that is current.

    ``begun`` is when it began, by ``time.perf_counter``; None is now.
    """
    if not _told:
        return cast("Span", _Silent())
    kind = trace.SpanKind[side.upper()]
    return _tracer.start_span(name, parent, kind, start_time=None if begun is None else _since_epoch(begun))


def part(of: Span, name: str, begun: float, ended: float, **attributes: Any) -> Span:
    """Add a span of what ran from ``begun`` to ``ended``, by ``time.perf_counter``, as a part of another; return it."""
    made = begin(name, parent=trace.set_span_in_context(of) if _told else None, begun=begun)
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
    """Note how a span ended. That the reader of a stream went away is no error."""
    name = type(error).__name__
    of.set_attribute("error.type", name)
    if _told and isinstance(error, Exception):
        of.set_status(trace.Status(trace.StatusCode.ERROR, name))


def recording() -> bool:
    """Say whether anybody records the span that is current."""
    return _told and trace.get_current_span().is_recording()


def headers(of: Span | None = None) -> dict[str, str]:
    """Return the headers that let another process's spans be parts of this one, or of the one that is current.

    They are W3C's ``traceparent`` and ``tracestate``, or what ``OTEL_PROPAGATORS`` says; none without a trace.
    """
    carrier: dict[str, str] = {}
    if _told:
        propagate.inject(carrier, None if of is None else trace.set_span_in_context(of))
    return carrier


def within(of: Span, items: Iterator[_T]) -> Generator[_T, None, None]:
    """Yield ``items`` with a span being current while each is made, and not while it is used; the span ends behind them."""
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
    """Do the same for an asynchronous iterator."""
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
