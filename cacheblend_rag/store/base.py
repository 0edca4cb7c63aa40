"""The contract of a KV store. See docs/architecture.md for who calls what when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from cacheblend_rag.store.codec import RAW
from cacheblend_rag.store.events import Activity, TierReads
from cacheblend_rag.store.keyring import KeyName, Keyring
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV

if TYPE_CHECKING:
    import torch

Writes = Literal["through", "back", "demoted"]
"""When a slower tier of several is given an entry: at once, and the put waits for it; a little later, by a thread; when a faster
tier evicts it."""

TIMEOUT_S = 2.0
"""Seconds that a look-up in a remote tier, or the read of a layer from it, may take, unless it is told otherwise."""


@dataclass(frozen=True)
class EntryInfo:
    """The KV of one key, as :meth:`KVStore.entries` lists it. Sizes in bytes, times in seconds since the epoch."""

    key: KVKey
    nbytes: int
    tier: str
    last_used: float


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and its present contents. Sizes in bytes.

    Attributes:
        tier: Name of the tier; ``"tiered"`` for several.
        reads: What reading layers took; nothing is read from RAM.
        out: Why the tier is not used at the moment, in words; empty if it is. Its contents are then unknown, and counted as 0.
        codec: How a tier encodes what it is given from now on; empty of several tiers.
        tiers: Each tier's own.
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


@dataclass(frozen=True)
class VerifyReport:
    """What a full check found. Damaged entries have been removed when ``repair`` was asked for.

    Attributes:
        checked: How many entries were looked at.
        damaged: Those whose bytes are not what was stored.
        unreadable: Those that cannot be read now, for want of permission, say; they stay.
    """

    checked: int
    damaged: tuple[KVKey, ...]
    unreadable: tuple[KVKey, ...] = ()


class KVStore(ABC):
    """One canonical, immutable copy of KV per key.

    All methods may be called from several threads. ``put`` is atomic: a reader sees a whole entry or none. A damaged or
    missing entry is a miss, never a wrong answer; so is one that cannot be read now, and nothing is removed for that.

    Attributes:
        budget: Bytes that :meth:`put` stays within; None: no limit.
        lasts: Whether entries outlast the process.
        remote: Whether a look-up goes to another machine, and may take its time.
        codecs: How its tiers encode what they are given (:func:`~cacheblend_rag.store.codec.get_codec`).
        keys: What entries are encrypted with where they are written; None for not at all.
        writes: When it is given entries, as a tier of several.
        on_evict: Called, if set, with each entry before it is evicted, which waits for it; of tiers with ``tells_evictions``.
    """

    budget: int | None = None
    lasts: bool = True
    remote: bool = False
    codecs: tuple[str, ...] = (RAW,)
    keys: Keyring | None = None
    writes: Writes = "through"
    tells_evictions: bool = False
    on_evict: Callable[[KVKey, StoredKV], None] | None = None

    def key_name(self, tenant: str) -> KeyName | None:
        """Return what the keys of a tenant's entries must hold (:func:`~cacheblend_rag.store.kv.kv_key`): the encryption's part.

        Raises:
            InputError: Entries are encrypted, and the tenant has no key.
        """
        return None if self.keys is None else self.keys.name(tenant)

    @abstractmethod
    def get(self, key: KVKey) -> StoredKV | None:
        """Return a readable entry and mark it as used, or None for a miss. Layers are read when asked for."""

    @abstractmethod
    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """Store ``kv``; return whether it is in the store afterwards.

        A key that is present is only marked as used, or with ``replace`` gets the new entry in one step (to add what an
        older entry lacks).

        False means that it is larger than what the budget leaves beside pinned entries.

        Raises:
            StoreError: The medium refuses (disk full, read-only) or does not answer. Existing entries are untouched.
        """

    @abstractmethod
    def contains(self, key: KVKey) -> bool:
        """Say whether ``key`` is present, without reading it or marking it as used."""

    @abstractmethod
    def delete(self, key: KVKey) -> bool:
        """Remove an entry, pinned or not; return whether it was there. It is no longer pinned.

        Readers that hold it finish undisturbed, or, where a tier is read from afar, find that it cannot be read any more.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    def touch(self, key: KVKey) -> None:  # noqa: B027 - not every tier has a cheap way
        """Mark ``key`` as used without reading it; nothing happens where it is absent or that costs too much."""

    def pin_for(self, device: torch.device) -> None:  # noqa: B027 - only tiers in memory have something to pin
        """Hold entries where ``device`` reads them by itself; engines say so of the store they read. Nothing on a CPU."""

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """Return memory ``[nbytes]``, uint8, in which an entry that is put needs no copy; None if any memory is as good.

        Least recently used entries are evicted for it. With ``wait`` memory may be pinned for it, which takes long.
        """
        return None

    @abstractmethod
    def pin(self, keys: Iterable[KVKey]) -> None:
        """Let eviction pass over these entries from now on, whoever evicts; also over those that are yet to be put.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def unpin(self, keys: Iterable[KVKey]) -> None:
        """Take back :meth:`pin`, which may not have been said.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def pins(self) -> frozenset[KVKey]:
        """Return what is pinned, stored or not.

        Raises:
            StoreError: It cannot be read.
        """

    @abstractmethod
    def entry(self, key: KVKey) -> EntryInfo | None:
        """Return what :meth:`entries` would list of one key, without listing; it does not count as a use."""

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """List what is stored, least recently used first.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """

    @abstractmethod
    def evict(self, to_bytes: int) -> int:
        """Evict least recently used entries until at most ``to_bytes`` remain, or only pinned ones. Return the bytes freed.

        Raises:
            StoreError: The medium refuses, or does not answer.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return counters and contents."""

    def out(self) -> dict[str, bool]:
        """Return of each remote tier whether it is not used at the moment, since it failed or was late."""
        return {}

    def activity(self) -> dict[str, Activity]:
        """Return what this process has counted, by tier: the counters of :meth:`stats` without looking at the contents."""
        return {}

    @abstractmethod
    def verify(self, repair: bool = True) -> VerifyReport:
        """Read every entry against its checksums; with ``repair``, remove the damaged ones.

        Raises:
            StoreUnavailableError: A remote tier does not answer.
        """

    def close(self) -> None:  # noqa: B027 - not every tier holds something open
        """Release handles. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()
