"""Records the events of a request and their times; its OpenTelemetry spans are made from them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

EventKind = Literal["computing", "loading"]

PLAN: Final = "plan"
"""Looking up stored KV and deciding how to use it."""
PREFILL: Final = "prefill"
"""Computing a whole prompt without stored KV."""
REST: Final = "rest of the prompt"
"""Computing the tokens behind a blend, by the engine itself."""
DECODE: Final = "token of the answer"


@dataclass(frozen=True)
class TraceEvent:
    """Records when a part of a request ran; the event may come from another process of the same machine.

    Attributes:
        kind: Whether the part computed or loaded.
        name: Description of the work.
        begin: Start, by the machine's ``time.perf_counter``; for work on a device, the time the work was queued.
        end: End, by the same clock.
        details: Tokens of each kind, or the tier and the bytes of a read.
    """

    kind: EventKind
    name: str
    begin: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


class Trace:
    """Records the events of one request, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[TraceEvent] = []

    def add(self, kind: EventKind, name: str, begin: float, **details: Any) -> None:
        """Add an event from ``begin``, by ``time.perf_counter``, until now."""
        self.merge([TraceEvent(kind, name, begin, time.perf_counter(), details)])

    @contextmanager
    def during(self, kind: EventKind, name: str, **details: Any) -> Iterator[None]:
        """Add the body's run as an event, also if the body fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, begin, **details)

    def merge(self, events: Sequence[TraceEvent]) -> None:
        """Add events that have ended, for example from another process."""
        with self._lock:
            self._events += events

    def events(self) -> tuple[TraceEvent, ...]:
        """Return the events so far."""
        with self._lock:
            return tuple(self._events)


def computing(trace: Trace | None, name: str, tokens: int) -> AbstractContextManager[None]:
    """Return a context that records the computation inside it, if there is a trace."""
    return nullcontext() if trace is None else trace.during("computing", name, tokens=tokens)
