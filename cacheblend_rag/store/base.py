"""States what every tier of a KV store must do, and, in interfaces of their own, what some can do besides.

Whoever needs what only some can asks with ``isinstance``. See docs/architecture.md for who calls what when.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError, UnknownCodecError, UnknownKeyError
from cacheblend_rag.store.closing import Closing as Closing  # noqa: PLC0414 - found here, too
from cacheblend_rag.store.events import Events, TierReads
from cacheblend_rag.store.kv import ChunkKV, KeyName, KVKey, StoredKV
from cacheblend_rag.store.kvfile import PLAIN, EntryFormat, KVFile
from cacheblend_rag.store.source import LayerSource

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

Writes = Literal["through", "back"]
"""When a slower tier of several is given an entry: at once, and the put waits for it; or a little later, by a thread."""

TIMEOUT_S = 2.0
"""Seconds that a look-up in a remote tier, or the read of a layer from it, may take, unless it is told otherwise."""


@dataclass(frozen=True)
class EntryInfo:
    """Describes the KV of one key. Sizes in bytes, times in seconds since the epoch; 0 where a tier keeps no times."""

    key: KVKey
    nbytes: int
    tier: str
    last_used: float


@dataclass(frozen=True)
class StoreStats:
    """Counts what happened since the store was opened, and its present contents. Sizes in bytes.

    Attributes:
        tier: Name of the tier; ``"tiered"`` for several.
        reads: What reading layers took; nothing is read from RAM.
        out: Why the tier is not used at the moment, in words; empty if it is. Its contents are then unknown, and counted as 0.
        codec: How a tier encodes what it is given from now on; empty of several tiers.
        tiers: Each tier's own.
        listed: Whether it can tell what it holds; else its contents are counted as 0.
        free: Bytes that its medium has left, for whoever writes there; None where that is not known.
    """

    tier: str
    entries: int
    nbytes: int
    budget: int | None  # None: no limit
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    damaged: int = 0
    reads: TierReads = field(default=TierReads())
    out: str = ""
    codec: str = ""
    tiers: tuple[StoreStats, ...] = field(default=())
    listed: bool = True
    free: int | None = None

    @property
    def capacity(self) -> int | None:
        """Return the bytes that it can hold: its budget, or less where its medium has no room for that; None for any number."""
        limits = [self.budget, None if self.free is None else self.nbytes + self.free]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class VerifyReport:
    """Says what a full check found. Damaged entries have been removed when ``repair`` was asked for.

    Attributes:
        checked: How many entries were looked at.
        damaged: Those whose bytes are not what was stored.
        unreadable: Those that cannot be read now, for want of permission, say; they stay.
    """

    checked: int
    damaged: tuple[KVKey, ...]
    unreadable: tuple[KVKey, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[KVKey], opened: Callable[[KVKey], KVFile | None]) -> VerifyReport:
        """Check every entry that ``opened`` opens; one for which it returns None is gone, and not counted."""
        checked, damaged, unreadable = 0, list[KVKey](), list[KVKey]()
        for key in keys:
            try:
                if (found := opened(key)) is None:
                    continue
                found.verify()
            except DamagedKVError:
                damaged.append(key)
            except (StoreUnavailableError, OSError):
                unreadable.append(key)
            checked += 1
        return cls(checked, tuple(damaged), tuple(unreadable))


class TierOptions(TypedDict, total=False):
    """Lists what any tier can be told when it is opened; see :class:`KVStore`."""

    tier: str
    format: EntryFormat
    writes: Writes


class KVStore(Closing):
    """Keeps one canonical, immutable copy of KV per key: what every tier must do.

    All methods may be called from several threads. ``put`` is atomic: a reader sees a whole entry or none. A damaged or
    missing entry is a miss, never a wrong answer; so is one that cannot be read now, and nothing is removed for that.

    Attributes:
        tier: Its name in statistics and costs.
        budget: Bytes that :meth:`put` stays within; None: no limit.
        format: How entries become bytes.
        writes: When it is given entries, as a tier of several.
        lasts: Whether entries outlast the process.
        remote: Whether a look-up goes to another machine, and may take its time.
    """

    lasts: bool = True
    remote: bool = False

    def __init__(
        self, budget: int | None = None, *, tier: str, format: EntryFormat = PLAIN, writes: Writes = "through"
    ):
        """Take what any tier is told; see the class."""
        self.budget, self.tier, self.format, self.writes = budget, tier, format, writes
        self._events = Events()

    @property
    def formats(self) -> tuple[EntryFormat, ...]:
        """Return the formats of all its tiers."""
        return (self.format,)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Return how its tiers encode what they are given (:func:`~cacheblend_rag.store.codec.get_codec`)."""
        return tuple(dict.fromkeys(each.codec.name for each in self.formats))

    def key_name(self, namespace: str) -> KeyName | None:
        """Return the encryption's part of the keys of a namespace's entries (:func:`~cacheblend_rag.store.kv.kv_key`).

        Raises:
            InputError: Entries are encrypted, and the namespace has no key.
        """
        return next((each.keys.name(namespace) for each in self.formats if each.keys is not None), None)

    @abstractmethod
    def get(self, key: KVKey) -> StoredKV | None:
        """Return a readable entry and mark it as used, or None for a miss. Layers are read when asked for."""

    @abstractmethod
    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """Store ``kv``; return whether it is in the store afterwards.

        A key that is present is only marked as used, or with ``replace`` gets the new entry in one step (to add what an
        older entry lacks).

        False means that it is larger than the budget.

        Raises:
            StoreError: The medium refuses (disk full, read-only) or does not answer. Existing entries are untouched.
        """

    @abstractmethod
    def contains(self, key: KVKey) -> bool:
        """Say whether ``key`` is present, without reading it or marking it as used."""

    @abstractmethod
    def delete(self, key: KVKey) -> bool:
        """Remove an entry; return whether it was there.

        Readers that hold it finish undisturbed, or, where a tier is read from afar, find that it cannot be read any more.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def entry(self, key: KVKey) -> EntryInfo | None:
        """Describe one entry; None where there is none. It does not count as a use."""

    def close(self) -> None:  # not every tier holds something open
        """Release handles. The store must not be used afterwards."""

    def _fits(self, nbytes: int) -> bool:
        return self.budget is None or nbytes <= self.budget

    def _stats(self, entries: int, nbytes: int, out: str = "") -> StoreStats:
        """Return what was counted, beside the contents."""
        reads, codec = self._events.reads.taken(), self.format.codec.name
        return StoreStats(
            self.tier, entries, nbytes, self.budget, **self._events.counts(), reads=reads, out=out, codec=codec
        )

    def _found(
        self,
        key: KVKey,
        source: LayerSource | None,
        on_damage: Callable[[KVFile, DamagedKVError], object],
        at_once: int = 1,
    ) -> KVFile | None:
        """Return the entry whose bytes ``source`` has, and count a hit; None, and a miss, where it cannot be read."""
        found = None
        try:
            if source is not None:
                found = self.format.open(source, key, self.tier, on_damage, self._events, at_once)
        except (UnknownCodecError, UnknownKeyError) as error:
            _log.warning("%s", str(error))
        except (DamagedKVError, StoreUnavailableError):  # told already
            pass
        self._events.add("misses" if found is None else "hits")
        return found


class Listing(ABC):
    """Is offered by a tier that can tell what it holds."""

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """List what is stored, least recently used first.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """

    @abstractmethod
    def verify(self, repair: bool = True) -> VerifyReport:
        """Read every entry against its checksums; with ``repair``, remove the damaged ones.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """


class Evicting(ABC):
    """Is offered by a tier that makes room by evicting what was used least recently."""

    @abstractmethod
    def evict(self, to_bytes: int) -> int:
        """Evict least recently used entries until at most ``to_bytes`` remain. Return the bytes freed.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def touch(self, key: KVKey) -> None:
        """Mark ``key`` as used without reading it; nothing happens where it is absent or that costs too much."""


class Reporting(ABC):
    """Is offered by a tier that counts what happens in it."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return counters and contents."""

    def out(self) -> dict[str, bool]:
        """Return of each remote tier whether it is not used at the moment, since it failed or was late."""
        return {}


class PageLocking(ABC):
    """Is offered by a tier whose memory can be page-locked, so that a device copies from it by itself."""

    @abstractmethod
    def page_lock_for(self, device: torch.device) -> None:
        """Hold entries where ``device`` reads them by itself. Nothing on a CPU."""

    @abstractmethod
    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """Return memory ``[nbytes]``, uint8, in which an entry that is put needs no copy; None if any memory is as good.

        Least recently used entries are evicted for it. With ``wait`` memory may be page-locked for it, which takes long.
        """


def stats_of(store: KVStore) -> StoreStats:
    """Return the stats of a store; of a tier that reports none its name, budget and codec."""
    if isinstance(store, Reporting):
        return store.stats()
    return StoreStats(store.tier, 0, 0, store.budget, codec=store.format.codec.name, listed=False)


def out_of(store: KVStore) -> dict[str, bool]:
    """See :meth:`Reporting.out`; nothing of a tier that reports none."""
    return store.out() if isinstance(store, Reporting) else {}


def page_lock_for(store: KVStore, device: torch.device) -> None:
    """See :meth:`PageLocking.page_lock_for`; engines say so of the store they read. Nothing where it cannot."""
    if isinstance(store, PageLocking):
        store.page_lock_for(device)


def room_in(store: KVStore, nbytes: int, wait: bool = False) -> torch.Tensor | None:
    """See :meth:`PageLocking.room`; None where it cannot."""
    return store.room(nbytes, wait) if isinstance(store, PageLocking) else None
