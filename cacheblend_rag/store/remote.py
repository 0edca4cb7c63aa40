"""Implements the common part of tiers on other machines. Each tier adds the reading and writing of an entry's bytes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar, Unpack

import numpy as np
import torch

from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store.base import TIMEOUT_S, EntryInfo, KVStore, StoreStats, TierOptions, VerifyReport
from cacheblend_rag.store.calls import AT_ONCE, RemoteCalls
from cacheblend_rag.store.kv import ChunkKV, KVKey, checked_key
from cacheblend_rag.store.kvfile import KVFile

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_NOBODY = KVKey("0" * 40)

HEAD_BYTES = 32 << 10
"""Bytes of an entry that a look-up reads: more than the header for most models, so that a look-up is one round trip."""


class Head(NamedTuple):
    """Holds the result of a look-up: size of the whole entry, its version (new for each put), and its first bytes."""

    nbytes: int
    version: str
    data: bytes | memoryview


class Written(NamedTuple):
    """Holds the result of a write: whether the entry was stored anew, and how many other entries were evicted."""

    new: bool
    evicted: int


class RemoteOptions(TierOptions, total=False):
    """Lists the further options of a tier on another machine.

    Attributes:
        ttl_s: Seconds after a put after which an entry expires; None (the default): never.
        timeout_s: Most seconds for a look-up, or the read of a layer.
    """

    ttl_s: float | None
    timeout_s: float


class RemoteStore(KVStore):
    """Stores entries on another machine, shared by any number of clients. The bytes equal the files of the disk tier.

    A subclass implements the abstract methods, whose names begin with an underscore. The methods run in threads, and
    raise one of the constructor's ``failures`` if the tier fails. The methods need no deadline: :class:`RemoteCalls`
    stops waiting.

    Attributes:
        where: Address of the tier, without secrets.
    """

    lists = True
    remote = True

    def __init__(
        self,
        where: str,
        failures: tuple[type[Exception], ...],
        budget: int | None,
        *,
        ttl_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
        **options: Unpack[TierOptions],
    ):
        """Set the options; connect on first use."""
        super().__init__(budget, **options)
        self.where, self._ttl_s = where, ttl_s
        self._calls = RemoteCalls(f"{self.tier} tier {where}", failures, timeout_s)

    def get(self, key: KVKey) -> KVFile | None:
        checked_key(key)
        try:
            head = self._calls(lambda: self._head(key, HEAD_BYTES))
        except StoreUnavailableError:  # logged already
            head = None
        return self._found(key, head and _RemoteSource(self, key, head), self._discard, AT_ONCE)

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        checked_key(key)
        if not replace and self._calls(lambda: self._has(key, use=True)):
            return True
        data = self.format.serialized(self.format.encode(key, kv))
        if not self._fits(len(data)):
            return False
        written = self._patiently(lambda: self._write(key, data, replace))
        self._events.add("evictions", written.evicted)
        self._events.add("puts", written.new)
        return True

    def contains(self, key: KVKey) -> bool:
        """See :meth:`KVStore.contains`; return False if the tier does not answer."""
        checked_key(key)
        try:
            return self._calls(lambda: self._has(key))
        except StoreUnavailableError:
            return False

    def delete(self, key: KVKey) -> bool:
        checked_key(key)
        return self._calls(lambda: self._remove(key, None))

    def touch(self, key: KVKey) -> None:
        """See :meth:`KVStore.touch`; the call does not wait for the tier."""
        checked_key(key)
        self._calls.soon(lambda: self._has(key, use=True))

    def entry(self, key: KVKey) -> EntryInfo | None:
        checked_key(key)
        return self._calls(lambda: self._info(key))

    def entries(self) -> Iterator[EntryInfo]:
        return iter(sorted(self._patiently(self._list), key=lambda entry: entry.last_used))

    def evict(self, to_bytes: int) -> int:
        freed, evicted = self._patiently(lambda: self._evict(to_bytes))
        self._events.add("evictions", evicted)
        return freed

    def stats(self) -> StoreStats:
        """See :meth:`KVStore.stats`; the contents include the entries of all clients."""
        out, entries, nbytes = "", 0, 0
        try:
            entries, nbytes = self._patiently(self._size)
        except StoreUnavailableError as error:
            out = self._calls.out or str(error)
        return self._stats(entries, nbytes, out)

    def out(self) -> dict[str, bool]:
        return {self.tier: bool(self._calls.out)}

    def verify(self, repair: bool = True) -> VerifyReport:
        on_damage = self._discard if repair else lambda *_: None

        def opened(key: KVKey) -> KVFile | None:
            head = self._calls(lambda: self._head(key, HEAD_BYTES, use=False))
            return head and self.format.open(_RemoteSource(self, key, head), key, self.tier, on_damage)

        return VerifyReport.of((entry.key for entry in self.entries()), opened)

    def close(self) -> None:
        self._calls.close()

    def read_range(self, key: KVKey, version: str, offset: int, nbytes: int) -> bytes | memoryview:
        """Return ``nbytes`` of an entry from ``offset`` on, or fewer if the entry ends before.

        Raises:
            StoreUnavailableError: The tier does not answer, or the entry of this version was removed.
        """
        data = self._calls(lambda: self._range(key, version, offset, nbytes))
        if data is None:
            raise StoreUnavailableError(f"KV entry {key} was removed from the {self._calls.name} while it was read.")
        return data

    def _patiently(self, function: Callable[[], _T]) -> _T:
        """Make a long call after the pending :meth:`touch` calls and a short call that detects a hanging tier."""
        self._calls.settle()
        self._calls(lambda: self._has(_NOBODY))
        return self._calls(function, long=True)

    def _discard(self, entry: KVFile, damage: DamagedKVError) -> None:
        """Remove a damaged entry, unless another version has already replaced the entry."""
        self._events.add("damaged")
        _log.warning("%s", damage)
        assert isinstance(entry.source, _RemoteSource)
        version = entry.source.version
        try:
            self._calls(lambda: self._remove(entry.key, version))
        except StoreUnavailableError as error:
            _log.warning("The damaged entry stays, and will be found damaged again: %s", error)

    @abstractmethod
    def _head(self, key: KVKey, nbytes: int, use: bool = True) -> Head | None:
        """Return size, version and the first ``nbytes`` of an entry, or None; with ``use``, mark the entry as used."""

    @abstractmethod
    def _range(self, key: KVKey, version: str, offset: int, nbytes: int) -> bytes | memoryview | None:
        """Return ``nbytes`` of an entry from ``offset`` on, or None if that version of the entry was removed."""

    @abstractmethod
    def _write(self, key: KVKey, data: bytes, replace: bool) -> Written:
        """Store an entry within the budget, evicting others as needed; without ``replace`` an existing entry stays."""

    def _has(self, key: KVKey, use: bool = False) -> bool:
        """Return whether the entry exists; with ``use``, mark the entry as used."""
        return self._head(key, 1, use) is not None

    @abstractmethod
    def _remove(self, key: KVKey, version: str | None) -> bool:
        """Remove an entry if the entry has that version (None: any version); return whether it was removed."""

    @abstractmethod
    def _info(self, key: KVKey) -> EntryInfo | None:
        """Describe one entry as :meth:`_list` does, or return None; the call does not count as a use."""

    @abstractmethod
    def _list(self) -> list[EntryInfo]:
        """List all entries."""

    def _size(self) -> tuple[int, int]:
        """Return the number of entries, and their total bytes."""
        found = self._list()
        return len(found), sum(entry.nbytes for entry in found)

    @abstractmethod
    def _evict(self, to_bytes: int) -> tuple[int, int]:
        """Remove least recently used entries until at most ``to_bytes`` remain.

        Returns:
            The bytes freed, and the number of removed entries.
        """


class _RemoteSource:
    """Reads an entry's bytes by range from a remote tier; the bytes of the :class:`Head` are read from memory."""

    def __init__(self, store: RemoteStore, key: KVKey, head: Head):
        self._store, self._key = store, key
        self.nbytes, self.version, self._head = head.nbytes, head.version, np.frombuffer(head.data, np.uint8)
        self.place = f"{store.where}, {key}"

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`."""
        end = offset + len(into)
        data = self._head[offset:end]
        if end > len(self._head):
            data = np.frombuffer(self._store.read_range(self._key, self.version, offset, len(into)), np.uint8)
        if len(data) != len(into):
            raise ValueError(f"{len(data)} bytes from {offset} on instead of {len(into)}")
        into.numpy()[:] = data
