"""Meters what reading stored KV took, tier by tier, and keeps the loading controller's costs current."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cacheblend_rag.store.events import ReadClock, TierReads
from cacheblend_rag.store.kv import StoredKV


@dataclass(frozen=True)
class ChunkLoad:
    """Says where the stored KV of one chunk in a prompt came from.

    Attributes:
        chunk_id: The chunk; empty for the header.
        tier: Name of the tier.
        nbytes: Size of what was read: layers that a dense pass computes afresh are not.
        seconds: Time in which at least one of its reads ran, beside the computation; 0 from RAM, where nothing is read.
    """

    chunk_id: str
    tier: str
    nbytes: int
    seconds: float


class ReadMeter:
    """Counts and times the reads of a prompt's layers, from several threads. RAM is not measured: nothing is read from there."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._tiers: dict[str, ReadClock] = {}
        self._entries: dict[int, ReadClock] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, kv: StoredKV) -> Iterator[None]:
        """Measure what runs inside as the read of one layer of ``kv``; one that fails counts as time alone."""
        if kv.tier == "ram":
            yield
            return
        with self._lock:
            tier = self._tiers.setdefault(kv.tier, ReadClock())
            entry = self._entries.setdefault(id(kv), ReadClock())
        nbytes = kv.stored_nbytes // kv.num_layers
        with tier.reading(nbytes), entry.reading(nbytes):
            yield

    def taken(self) -> Mapping[str, TierReads]:
        """Return what was read so far, by tier."""
        with self._lock:
            return {name: tier.taken() for name, tier in self._tiers.items()}

    def under_way(self) -> Mapping[str, TierReads]:
        """Return the tiers that are being read, and what that has taken so far; see :meth:`ReadClock.under_way`."""
        with self._lock:
            tiers = dict(self._tiers)
        return {name: reads for name, tier in tiers.items() if (reads := tier.under_way()) is not None}

    def taken_of(self, kv: StoredKV) -> TierReads:
        """Return what was read of one entry so far."""
        with self._lock:
            entry = self._entries.get(id(kv))
        return TierReads() if entry is None else entry.taken()
