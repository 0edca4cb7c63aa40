"""Counts what has happened in a tier, and what reading took; adds up what all processes counted that have used a directory."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout

from cacheblend_rag.store.files import file_mode, write_text

Event = Literal["hits", "misses", "puts", "evictions", "damaged"]


@dataclass(frozen=True)
class TierReads:
    """Sums up reads from one tier: their bytes, their number, and the seconds during which at least one of them ran."""

    nbytes: int = 0
    count: int = 0
    seconds: float = 0.0


def added(some: Mapping[str, TierReads], others: Mapping[str, TierReads]) -> dict[str, TierReads]:
    """Return, tier by tier, the reads of both."""
    none = TierReads()
    both = {tier: (some.get(tier, none), others.get(tier, none)) for tier in (*some, *others)}
    return {t: TierReads(a.nbytes + b.nbytes, a.count + b.count, a.seconds + b.seconds) for t, (a, b) in both.items()}


class ReadClock:
    """Adds up reads of several threads; time in which several of them run counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = TierReads()
        self._running = self._running_bytes = 0
        self._since = self._waited_s = 0.0

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Measure what runs inside as a read of ``nbytes``; one that fails counts as time alone."""
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
        """Return what was read so far."""
        with self._lock:
            return self._done

    def wait(self, seconds: float) -> None:
        """Count time in which a computation waited for reads."""
        with self._lock:
            self._waited_s += seconds

    @property
    def waited_s(self) -> float:
        """Return the seconds that computations waited for reads so far."""
        with self._lock:
            return self._waited_s

    def under_way(self) -> TierReads | None:
        """Return what was read so far and what is being read, as if that ended now; None where nothing is being read."""
        with self._lock:
            if not self._running:
                return None
            done, took = self._done, time.perf_counter() - self._since
            return TierReads(done.nbytes + self._running_bytes, done.count + self._running, done.seconds + took)


@dataclass(frozen=True)
class Activity:
    """Holds all that was counted of a tier, by one process or by several.

    Attributes:
        hits: Look-ups that found an entry.
        misses: Look-ups that did not.
        puts: Entries written.
        evictions: Entries evicted for want of room.
        damaged: Entries found damaged.
        read_bytes: Size of the layers read.
        read_s: Seconds in which at least one of a process's reads ran.
        waited_s: Seconds that computations waited for them.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    damaged: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: Activity) -> Activity:
        mine, theirs = astuple(self), astuple(other)
        return Activity(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def hit_rate(self) -> float | None:
        """Return the share of the look-ups that found an entry; None without any."""
        looked = self.hits + self.misses
        return self.hits / looked if looked else None

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate of reading; None where nothing was read."""
        return self.read_bytes / self.read_s if self.read_s > 0 else None

    @property
    def hidden(self) -> float | None:
        """Return the share of the time of reading that hid behind computing (paper section 5); None where nothing was read."""
        return max(0.0, 1 - self.waited_s / self.read_s) if self.read_s > 0 else None


class Events:
    """Counts, from any thread, under the names of the fields of :class:`~cacheblend_rag.store.base.StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(get_args(Event), 0)
        self.reads = ReadClock()

    def add(self, event: Event, times: int = 1) -> None:
        """Count ``event``."""
        with self._lock:
            self._counts[event] += times

    def counts(self) -> dict[str, Any]:
        """Return all counts so far, by event."""
        with self._lock:
            return self._counts.copy()

    def activity(self) -> Activity:
        """Return all that was counted so far."""
        reads = self.reads.taken()
        return Activity(**self.counts(), read_bytes=reads.nbytes, read_s=reads.seconds, waited_s=self.reads.waited_s)


_log = logging.getLogger(__name__)
_LOCK_S = 5.0


class StoreTally:
    """Adds up the counters of each tier over processes; each adds its own when it closes the store."""

    def __init__(self, directory: Path):
        """Keep them in ``directory``; touches nothing yet."""
        self._file = directory / "activity.json"

    def read(self) -> dict[str, Activity]:
        """Return the counters by tier; none where there are none, or they cannot be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(tier): Activity(**counted) for tier, counted in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, counted: Mapping[str, Activity]) -> None:
        """Add a process's counters; silent where the directory cannot be written to."""
        new = {tier: each for tier, each in counted.items() if each != Activity()}
        if not new:
            return
        lock = self._file.with_suffix(".lock")
        try:
            with FileLock(lock, timeout=_LOCK_S, mode=file_mode(lock.parent)):
                all_in_all = self.read()
                for tier, each in new.items():
                    all_in_all[tier] = all_in_all.get(tier, Activity()) + each
                written = self._file.with_suffix(".new")
                write_text(written, json.dumps({tier: asdict(each) for tier, each in all_in_all.items()}))
                written.replace(self._file)
        except (OSError, Timeout) as error:
            _log.debug("What was counted cannot be kept in %s: %s", self._file, error)
