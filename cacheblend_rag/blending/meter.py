"""What reading stored KV took, tier by tier: what keeps the loading controller's costs current."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cacheblend_rag.store.kv import StoredKV


@dataclass(frozen=True)
class TierReads:
    """Reads from one tier for one prompt.

    Attributes:
        nbytes: Size of what was read.
        count: How many reads.
        seconds: Time during which at least one of them ran.
    """

    nbytes: int = 0
    count: int = 0
    seconds: float = 0.0


class _Tier:
    def __init__(self) -> None:
        self.reads = TierReads()
        self.running = 0
        self.since = 0.0


class ReadMeter:
    """Counts and times the reads of a prompt's layers, from several threads. RAM is not measured: nothing is read from there."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._tiers: dict[str, _Tier] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, kv: StoredKV) -> Iterator[None]:
        """Measure what runs inside as the read of one layer of ``kv``; one that fails counts as time alone."""
        if kv.tier == "ram":
            yield
            return
        with self._lock:
            tier = self._tiers.setdefault(kv.tier, _Tier())
            if tier.running == 0:
                tier.since = time.perf_counter()
            tier.running += 1
        nbytes = 0
        try:
            yield
            nbytes = kv.nbytes // kv.num_layers
        finally:
            with self._lock:
                tier.running -= 1
                took = time.perf_counter() - tier.since if tier.running == 0 else 0.0
                done = tier.reads
                tier.reads = TierReads(done.nbytes + nbytes, done.count + bool(nbytes), done.seconds + took)

    def taken(self) -> Mapping[str, TierReads]:
        """Return what was read so far, by tier."""
        with self._lock:
            return {name: tier.reads for name, tier in self._tiers.items()}
