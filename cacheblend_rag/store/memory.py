"""Keeps entries in RAM."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from cacheblend_rag.store.base import (
    EntryInfo,
    Evicting,
    KVStore,
    Listing,
    PageLocking,
    Reporting,
    StoreStats,
    TierOptions,
    VerifyReport,
)
from cacheblend_rag.store.block import ALIGNMENT, Pieces, flat, nbytes_of, packed
from cacheblend_rag.store.events import Activity
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV
from cacheblend_rag.store.pagelocked import PageLockedMemory, can_page_lock


@dataclass
class _Held:
    kv: ChunkKV
    last_used: float


class MemoryStore(KVStore, Listing, Evicting, Reporting, PageLocking):
    """Keeps KV entries in host memory under a byte budget, least recently used out first.

    Every layer is one contiguous block. Where a device reads them (:meth:`page_lock_for`), the blocks are page-locked.
    """

    lasts = False

    def __init__(self, budget: int | None = None, **options: Unpack[TierOptions]):
        """Open an empty store that holds at most ``budget`` bytes of keys and values (None: no limit)."""
        options.setdefault("tier", "ram")
        super().__init__(budget, **options)
        self._lock = threading.Lock()
        self._held: OrderedDict[KVKey, _Held] = OrderedDict()
        self._nbytes = 0
        self._page_locked: PageLockedMemory | None = None
        self._pins: set[KVKey] = set()
        self._on_change: Callable[[KVKey, int], None] = lambda key, nbytes: None

    def tell_changes(self, listener: Callable[[KVKey, int], None]) -> None:
        """Call ``listener`` with a key and the bytes held of it from now on, 0 for none; it must not use the store."""
        self._on_change = listener

    def page_lock_for(self, device: torch.device) -> None:
        """See :meth:`PageLocking.page_lock_for`. It never exceeds the budget; what finds no room lies in ordinary memory."""
        if self._page_locked is not None or not can_page_lock(device):
            return
        self._page_locked = PageLockedMemory(device, self.budget)
        with self._lock:
            held = list(self._held.items())
        for key, entry in held:
            if (room := self.room(nbytes_of(entry.kv.layers), wait=True)) is not None:
                layers = packed(entry.kv.layers, Pieces(room))
                self.put(key, ChunkKV(layers, entry.kv.start, static=entry.kv.static_deviation()), replace=True)
        self._page_locked.grow_ahead()

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
        """See :meth:`PageLocking.room`."""
        if self._page_locked is None or not self._fits(nbytes):
            return None
        block = self._page_locked.take(nbytes)
        if block is None and wait and self._page_locked.grow(nbytes):
            block = self._page_locked.take(nbytes)
        self._page_locked.grow_ahead()
        with self._lock:
            while block is None and self._page_locked.is_full_for(nbytes) and self._evict(self._nbytes - 1):
                block = self._page_locked.take(nbytes)
        return block

    def get(self, key: KVKey) -> ChunkKV | None:
        """See :meth:`KVStore.get`. Every caller gets the same tensors."""
        with self._lock:
            held = self._use(key)
        self._events.add("misses" if held is None else "hits")
        return held.kv if held else None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. What is not in contiguous layers, or keeps more alive than itself, is copied."""
        with self._lock:
            if not replace and self._use(key):
                return True
            if not self._has_room(key, kv.nbytes):
                return False
        owned = ChunkKV(self._owned(kv), kv.start, static=kv.static_deviation())
        with self._lock:
            if not replace and self._use(key):
                return True
            if not self._has_room(key, owned.nbytes):  # more were pinned meanwhile
                return False
            self._remove(key)
            if self.budget is not None:
                self._evict(self.budget - owned.nbytes)
            self._held[key] = _Held(owned, time.time())
            self._nbytes += owned.nbytes
            self._on_change(key, owned.nbytes)
        self._events.add("puts")
        return True

    def contains(self, key: KVKey) -> bool:
        """See :meth:`KVStore.contains`."""
        with self._lock:
            return key in self._held

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`."""
        with self._lock:
            self._pins.discard(key)
            return self._remove(key) is not None

    def touch(self, key: KVKey) -> None:
        """See :meth:`Evicting.touch`."""
        with self._lock:
            self._use(key)

    def pin(self, keys: Iterable[KVKey]) -> None:
        """See :meth:`Evicting.pin`."""
        with self._lock:
            self._pins.update(keys)

    def unpin(self, keys: Iterable[KVKey]) -> None:
        """See :meth:`Evicting.unpin`."""
        with self._lock:
            self._pins.difference_update(keys)

    def pins(self) -> frozenset[KVKey]:
        """See :meth:`Evicting.pins`."""
        with self._lock:
            return frozenset(self._pins)

    def entry(self, key: KVKey) -> EntryInfo | None:
        """See :meth:`KVStore.entry`."""
        with self._lock:
            held = self._held.get(key)
            return None if held is None else EntryInfo(key, held.kv.nbytes, self.tier, held.last_used)

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`Listing.entries`; a snapshot."""
        with self._lock:
            snapshot = [EntryInfo(key, held.kv.nbytes, self.tier, held.last_used) for key, held in self._held.items()]
        return iter(snapshot)

    def evict(self, to_bytes: int) -> int:
        """See :meth:`Evicting.evict`."""
        with self._lock:
            return self._evict(to_bytes)

    def stats(self) -> StoreStats:
        """See :meth:`Reporting.stats`."""
        with self._lock:
            return self._stats(len(self._held), self._nbytes)

    def activity(self) -> dict[str, Activity]:
        """See :meth:`Reporting.activity`."""
        return {self.tier: self._events.activity()}

    def verify(self, repair: bool = True) -> VerifyReport:
        """Count the entries; memory carries no checksums, so none of them can be found damaged."""
        with self._lock:
            return VerifyReport(len(self._held), ())

    def close(self) -> None:
        """Let go of every entry."""
        with self._lock:
            self._held.clear()
            self._nbytes = 0

    def _owned(self, kv: ChunkKV) -> Sequence[LayerKV]:
        """Return the layers in host memory of their own: as they are, or a copy in one block."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for layer in kv.layers for x in layer}
        in_blocks = all(layer.k.device.type == "cpu" and flat(layer) is not None for layer in kv.layers)
        alone = in_blocks and sum(storages.values()) <= kv.nbytes + len(kv.layers) * ALIGNMENT
        if alone and (self._page_locked is None or all(self._page_locked.holds(layer.k) for layer in kv.layers)):
            return kv.layers
        # Without waiting: a request may be what moves an entry up into this tier.
        room = self.room(nbytes_of(kv.layers))
        if room is None:
            return kv.layers if alone else packed(kv.layers)
        return packed(kv.layers, lambda _: room)

    def _use(self, key: KVKey) -> _Held | None:
        held = self._held.get(key)
        if held:
            held.last_used = time.time()
            self._held.move_to_end(key)
        return held

    def _fits(self, nbytes: int) -> bool:
        return self.budget is None or nbytes <= self.budget

    def _has_room(self, key: KVKey, nbytes: int) -> bool:
        if self.budget is None or nbytes + self._nbytes <= self.budget:
            return True
        pinned = (self._held[each].kv.nbytes for each in self._pins if each != key and each in self._held)
        return nbytes + sum(pinned) <= self.budget

    def _remove(self, key: KVKey) -> _Held | None:
        held = self._held.pop(key, None)
        if held:
            self._nbytes -= held.kv.nbytes
            self._on_change(key, 0)
        return held

    def _evict(self, to_bytes: int) -> int:
        before = self._nbytes
        passed = 0
        while passed < len(self._held) and self._nbytes > to_bytes:
            victim = next(iter(self._held))
            if victim in self._pins:
                self._held.move_to_end(victim)  # so that the next eviction need not pass it again
                passed += 1
                continue
            self._remove(victim)
            self._events.add("evictions")
        return before - self._nbytes
