"""Defines the interface of every tier of a KV store."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError, UnknownCodecError, UnknownKeyError
from cacheblend_rag.store.closing import Closing as Closing  # noqa: PLC0414 - exported here, too
from cacheblend_rag.store.events import Events, TierReads
from cacheblend_rag.store.kv import ChunkKV, KeyName, KVKey, StoredKV
from cacheblend_rag.store.kvfile import PLAIN, EntryFormat, KVFile
from cacheblend_rag.store.source import LayerSource

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

Writes = Literal["through", "back"]
"""When ``put`` writes to a slower tier: ``through`` waits for the write; ``back`` leaves the write to a thread."""

TIMEOUT_S = 2.0
"""Default limit in seconds for a look-up in a remote tier, and for the read of one layer from a remote tier."""


@dataclass(frozen=True)
class EntryInfo:
    """Describes one entry. Sizes are in bytes, times in seconds since the epoch; 0 if a tier records no times."""

    key: KVKey
    nbytes: int
    tier: str
    last_used: float


@dataclass(frozen=True)
class StoreStats:
    """Counts events since the store was opened, and the store's present contents. Sizes are in bytes.

    Attributes:
        tier: Name of the tier; ``"tiered"`` for a store of several tiers.
        reads: Bytes, number and duration of the reads of layers; reads from RAM are not counted.
        out: Reason why the tier is not used at the moment; empty if the tier is used. The contents of a tier that is
            not used are unknown, and count as 0.
        codec: Name of the codec for new entries; empty for a store of several tiers.
        tiers: Statistics of each tier.
        listed: Whether the tier can list its entries; otherwise the contents count as 0.
        free: Free bytes on the tier's medium, available to any writer; None if unknown.
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
        """Return how many bytes the tier can hold: the budget, or less if the medium is too small; None: no limit."""
        limits = [self.budget, None if self.free is None else self.nbytes + self.free]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class VerifyReport:
    """Reports the result of a full check. A check with ``repair`` has removed the damaged entries.

    Attributes:
        checked: Number of entries checked.
        damaged: Keys of the entries whose bytes differ from the stored bytes.
        unreadable: Keys of the entries that cannot be read now, for example without permission; these entries stay.
    """

    checked: int
    damaged: tuple[KVKey, ...]
    unreadable: tuple[KVKey, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[KVKey], opened: Callable[[KVKey], KVFile | None]) -> VerifyReport:
        """Check every entry that ``opened`` returns. An entry for which ``opened`` returns None is not counted."""
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
    """Lists the options that every tier accepts when it is opened; see :class:`KVStore`."""

    tier: str
    format: EntryFormat
    writes: Writes


class KVStore(Closing):
    """Stores one canonical, immutable copy of KV per key: the interface of every tier.

    A tier must have ``get``, ``put``, ``contains``, ``delete``, ``entry`` and ``close``. The other operations do nothing
    unless the tier overrides them.

    All methods may be called from several threads. ``put`` is atomic: a reader sees a whole entry or none. A damaged or
    missing entry is a miss, never a wrong answer. An entry that cannot be read now is a miss, too, and is not removed.

    Attributes:
        tier: Name of the tier in statistics and costs.
        budget: Most bytes that :meth:`put` lets the tier hold; None: no limit.
        format: Format in which entries are encoded to bytes.
        writes: When a store of several tiers writes entries to this tier.
        lasts: Whether entries outlast the process.
        lists: Whether the tier lists, verifies and evicts entries.
        remote: Whether a look-up goes to another machine, and may be slow.

    Example::

        with open_store("~/kv") as store:
            kv = store.get(key)
            layer = None if kv is None else kv.layer(0)
    """

    lasts: bool = True
    lists: bool = False
    remote: bool = False

    def __init__(
        self, budget: int | None = None, *, tier: str, format: EntryFormat = PLAIN, writes: Writes = "through"
    ):
        """Set the attributes of the class."""
        self.budget, self.tier, self.format, self.writes = budget, tier, format, writes
        self._events = Events()

    @property
    def formats(self) -> tuple[EntryFormat, ...]:
        """Return the format of each tier of the store."""
        return (self.format,)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Return the names of the codecs of the store's tiers (:func:`~cacheblend_rag.store.codec.get_codec`)."""
        return tuple(dict.fromkeys(each.codec.name for each in self.formats))

    def key_name(self, namespace: str) -> KeyName | None:
        """Return the encryption's part of a namespace's KV keys (:func:`~cacheblend_rag.store.kv.kv_key`), or None.

        Raises:
            InputError: Entries are encrypted, and the namespace has no encryption key.
        """
        return next((each.keys.name(namespace) for each in self.formats if each.keys is not None), None)

    @abstractmethod
    def get(self, key: KVKey) -> StoredKV | None:
        """Return an entry and mark the entry as used, or return None for a miss. Each layer is read on request."""

    @abstractmethod
    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """Store ``kv``; return whether the entry is stored afterwards. False means that ``kv`` exceeds the budget.

        If ``key`` is present, the method only marks the entry as used. With ``replace`` the new entry replaces the old
        entry in one step (to add data that the old entry lacks).

        Raises:
            StoreError: The medium refuses (disk full, read-only) or does not answer. Existing entries are untouched.
        """

    @abstractmethod
    def contains(self, key: KVKey) -> bool:
        """Return whether ``key`` is present, without reading the entry or marking the entry as used."""

    @abstractmethod
    def delete(self, key: KVKey) -> bool:
        """Remove an entry; return whether the entry was present.

        Readers that have opened the entry can read on; in a remote tier a further read raises StoreUnavailableError.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def entry(self, key: KVKey) -> EntryInfo | None:
        """Describe one entry, or return None if the key is absent. The call does not count as a use."""

    def close(self) -> None:  # some tiers have no handles
        """Release handles. The store must not be used afterwards."""

    def entries(self) -> Iterator[EntryInfo]:
        """List the stored entries, least recently used first.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """
        return iter(())

    def verify(self, repair: bool = True) -> VerifyReport:
        """Check every entry against its checksums; with ``repair``, remove the damaged entries.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """
        return VerifyReport(0, ())

    def evict(self, to_bytes: int) -> int:
        """Evict least recently used entries until at most ``to_bytes`` remain. Return the bytes freed.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """
        return 0

    def touch(self, key: KVKey) -> None:
        """Mark ``key`` as used without reading the entry; do nothing if ``key`` is absent or marking costs too much."""

    def stats(self) -> StoreStats:
        """Return counters and contents."""
        return self._stats(0, 0)

    def out(self) -> dict[str, bool]:
        """Return, by name of each remote tier, whether the tier is skipped now because it failed or was late."""
        return {}

    def page_lock_for(self, device: torch.device) -> None:
        """Hold entries in page-locked memory, which ``device`` copies from by DMA. Do nothing for a CPU."""

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """Return memory ``[nbytes]``, uint8, from which ``put`` makes no copy; None if any other memory is as good.

        The method may evict least recently used entries to make room. With ``wait`` it may page-lock more memory, which
        is slow.
        """
        return None

    def _fits(self, nbytes: int) -> bool:
        return self.budget is None or nbytes <= self.budget

    def _stats(self, entries: int, nbytes: int, out: str = "") -> StoreStats:
        """Return the statistics: the given contents, and the events and reads counted so far."""
        reads, codec = self._events.reads.taken(), self.format.codec.name
        contents = (self.tier, entries, nbytes, self.budget)
        return StoreStats(*contents, **self._events.counts(), reads=reads, out=out, codec=codec, listed=self.lists)

    def _found(
        self,
        key: KVKey,
        source: LayerSource | None,
        on_damage: Callable[[KVFile, DamagedKVError], object],
        at_once: int = 1,
    ) -> KVFile | None:
        """Open the entry in ``source`` and count a hit, or return None and count a miss if it cannot be read."""
        found = None
        try:
            if source is not None:
                found = self.format.open(source, key, self.tier, on_damage, self._events, at_once)
        except (UnknownCodecError, UnknownKeyError) as error:
            _log.warning("%s", str(error))
        except (DamagedKVError, StoreUnavailableError):  # logged already
            pass
        self._events.add("misses" if found is None else "hits")
        return found
