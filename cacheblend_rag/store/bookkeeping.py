"""The small state that every tier keeps about itself: counters and pins."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypedDict

from cacheblend_rag.store.kv import KVKey

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


class Pins:
    """How often each key is pinned. Not locked: the owner's lock orders pins against evictions."""

    def __init__(self) -> None:
        self._counts: Counter[KVKey] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def __iter__(self) -> Iterator[KVKey]:
        return iter(self._counts)

    def add(self, key: KVKey) -> None:
        """Pin once more."""
        self._counts[key] += 1

    def drop(self, key: KVKey) -> None:
        """Undo one pin.

        Raises:
            ValueError: There is none.
        """
        if key not in self._counts:
            raise ValueError(f"KV entry {key} is not pinned: every unpin needs a pin before it")
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
