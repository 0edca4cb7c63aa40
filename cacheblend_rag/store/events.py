"""Counters of what has happened in a tier: hits, misses, puts, evictions, damage."""

from __future__ import annotations

import threading
from typing import Literal, TypedDict

Event = Literal["hits", "misses", "puts", "evictions", "damaged"]


class Counts(TypedDict):
    """How often each event was counted."""

    hits: int
    misses: int
    puts: int
    evictions: int
    damaged: int


class Events:
    """Thread-safe counters, named as the fields of :class:`~cacheblend_rag.store.base.StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts(hits=0, misses=0, puts=0, evictions=0, damaged=0)

    def add(self, event: Event, times: int = 1) -> None:
        """Count ``event``."""
        with self._lock:
            self._counts[event] += times

    def counts(self) -> Counts:
        """Return all counts so far."""
        with self._lock:
            return self._counts.copy()
