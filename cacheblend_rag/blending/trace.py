"""Records what was done for a request, and when: what its OpenTelemetry spans are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

EventKind = Literal["computing", "loading"]

PLAN: Final = "plan"
"""Looking stored KV up, and what it is used for."""
PREFILL: Final = "prefill"
"""A whole prompt computed without stored KV."""
REST: Final = "rest of the prompt"
"""What an engine computes behind a blend."""
DECODE: Final = "token of the answer"


@dataclass(frozen=True)
class TraceEvent:
    """Says of a part of a request when it ran; it may come from another process of the same machine.

    Attributes:
        kind: Whether it computed or loaded.
        name: What was done.
        begin: When it began, by ``time.perf_counter``, which is the machine's; of a device's work, when it was asked for.
        end: When it ended.
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
        """Add an event from ``begin``, of ``time.perf_counter``, until now."""
        self.merge([TraceEvent(kind, name, begin, time.perf_counter(), details)])

    @contextmanager
    def during(self, kind: EventKind, name: str, **details: Any) -> Iterator[None]:
        """Add what runs inside as an event, also if it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, begin, **details)

    def merge(self, events: Sequence[TraceEvent]) -> None:
        """Add events that have ended, such as another process's."""
        with self._lock:
            self._events += events

    def events(self) -> tuple[TraceEvent, ...]:
        """Return what was recorded so far."""
        with self._lock:
            return tuple(self._events)


def computing(trace: Trace | None, name: str, tokens: int) -> AbstractContextManager[None]:
    """Return what records the computation inside it, where there is a trace."""
    return nullcontext() if trace is None else trace.during("computing", name, tokens=tokens)
