"""The RAM tier."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, VerifyReport
from cacheblend_rag.store.events import Events
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV


@dataclass
class _Held:
    kv: ChunkKV
    last_used: float


class MemoryStore(KVStore):
    """KV entries in host memory under a byte budget, least recently used out first."""

    def __init__(self, budget: int | None = None):
        """Open an empty store that holds at most ``budget`` bytes of keys and values (None: no limit)."""
        self.budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[KVKey, _Held] = OrderedDict()
        self._nbytes = 0
        self._events = Events()

    def get(self, key: KVKey) -> ChunkKV | None:
        """See :meth:`KVStore.get`. Every caller gets the same tensors."""
        with self._lock:
            held = self._use(key)
        self._events.add("misses" if held is None else "hits")
        return held.kv if held else None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. Tensors that are views into something larger are copied, so that only they stay."""
        with self._lock:
            if not replace and self._use(key):
                return True
            if not self._fits(kv.nbytes):
                return False
        owned = ChunkKV(
            [LayerKV(_owned(layer.k), _owned(layer.v)) for layer in kv.layers], kv.start, static=kv.static_deviation()
        )
        with self._lock:
            if replace:
                self._remove(key)
            elif self._use(key):
                return True
            if self.budget is not None:
                self._evict(self.budget - owned.nbytes)
            self._held[key] = _Held(owned, time.time())
            self._nbytes += owned.nbytes
        self._events.add("puts")
        return True

    def contains(self, key: KVKey) -> bool:
        """See :meth:`KVStore.contains`."""
        with self._lock:
            return key in self._held

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`."""
        with self._lock:
            return self._remove(key) is not None

    def touch(self, key: KVKey) -> None:
        """See :meth:`KVStore.touch`."""
        with self._lock:
            self._use(key)

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`KVStore.entries`; a snapshot."""
        with self._lock:
            snapshot = [EntryInfo(key, held.kv.nbytes, "ram", held.last_used) for key, held in self._held.items()]
        return iter(snapshot)

    def evict(self, to_bytes: int) -> int:
        """See :meth:`KVStore.evict`."""
        with self._lock:
            return self._evict(to_bytes)

    def stats(self) -> StoreStats:
        """See :meth:`KVStore.stats`."""
        with self._lock:
            return StoreStats("ram", len(self._held), self._nbytes, self.budget, **self._events.counts())

    def verify(self, repair: bool = True) -> VerifyReport:
        """Count the entries; memory carries no checksums, so none of them can be found damaged."""
        with self._lock:
            return VerifyReport(len(self._held), ())

    def close(self) -> None:
        """Let go of every entry."""
        with self._lock:
            self._held.clear()
            self._nbytes = 0

    def _use(self, key: KVKey) -> _Held | None:
        held = self._held.get(key)
        if held:
            held.last_used = time.time()
            self._held.move_to_end(key)
        return held

    def _fits(self, nbytes: int) -> bool:
        return self.budget is None or nbytes <= self.budget

    def _remove(self, key: KVKey) -> _Held | None:
        held = self._held.pop(key, None)
        if held:
            self._nbytes -= held.kv.nbytes
        return held

    def _evict(self, to_bytes: int) -> int:
        before = self._nbytes
        while self._held and self._nbytes > to_bytes:
            self._remove(next(iter(self._held)))
            self._events.add("evictions")
        return before - self._nbytes


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in host memory, with a storage no larger than itself."""
    host = tensor.detach().to("cpu")
    whole = host.untyped_storage().nbytes() == host.numel() * host.element_size()
    return host if whole and host.is_contiguous() else host.clone(memory_format=torch.contiguous_format)
