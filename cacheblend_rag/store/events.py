"""Counts the events in a tier and measures its reads, within this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

Event = Literal["hits", "misses", "puts", "evictions", "damaged"]


@dataclass(frozen=True)
class TierReads:
    """Sums up reads from one tier: bytes, number of reads, and the seconds during which at least one read ran."""

    nbytes: int = 0
    count: int = 0
    seconds: float = 0.0


def added(some: Mapping[str, TierReads], others: Mapping[str, TierReads]) -> dict[str, TierReads]:
    """Return, for each tier, the sum of the reads in both mappings."""
    none = TierReads()
    both = {tier: (some.get(tier, none), others.get(tier, none)) for tier in (*some, *others)}
    return {t: TierReads(a.nbytes + b.nbytes, a.count + b.count, a.seconds + b.seconds) for t, (a, b) in both.items()}


class ReadClock:
    """Adds up the reads of several threads; time during which several reads run counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = TierReads()
        self._running = self._running_bytes = 0
        self._since = 0.0

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Measure a ``with`` block as a read of ``nbytes``; a read that fails counts only as time."""
        with self._lock:
            if self._running == 0:
                self._since = time.perf_counter()
            self._running += 1
            self._running_bytes += nbytes
        read = 0
        try:
            yield
            read = nbytes
        finally:
            with self._lock:
                self._running -= 1
                self._running_bytes -= nbytes
                took = time.perf_counter() - self._since if self._running == 0 else 0.0
                done = self._done
                self._done = TierReads(done.nbytes + read, done.count + bool(read), done.seconds + took)

    def taken(self) -> TierReads:
        """Return the finished reads."""
        with self._lock:
            return self._done

    def under_way(self) -> TierReads | None:
        """Return the finished and the running reads, as if the running reads ended now; None if no read is running."""
        with self._lock:
            if not self._running:
                return None
            done, took = self._done, time.perf_counter() - self._since
            return TierReads(done.nbytes + self._running_bytes, done.count + self._running, done.seconds + took)


class Events:
    """Counts events from any thread, by the field names of :class:`~cacheblend_rag.store.base.StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(get_args(Event), 0)
        self.reads = ReadClock()

    def add(self, event: Event, times: int = 1) -> None:
        """Count ``event`` ``times`` times."""
        with self._lock:
            self._counts[event] += times

    def counts(self) -> dict[str, Any]:
        """Return all counts so far, by event."""
        with self._lock:
            return self._counts.copy()
