"""Keeps entries in RAM."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt
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
from cacheblend_rag.store.codec import CodedKV, coded
from cacheblend_rag.store.kv import ALIGNMENT, ChunkKV, KVKey, LayerKV, Pieces, can_page_lock, flat, nbytes_of, packed

_log = logging.getLogger(__name__)

# Page-locking takes about as long as writing to the memory, so it is done in large slabs; PyTorch rounds them to powers of two.
SLAB = 1 << 29
_ALIGNMENT = 512


class PageLockedMemory:
    """Hands out blocks of page-locked memory, and takes each back when the last tensor that looks into it is gone.

    Slabs are page-locked one after another as they are needed, and kept. A block belongs to whoever holds a view of it: nobody
    has to say that it is free, and a block in use is never given away. Copies by a device count as use only while somebody
    holds their source or target (see :class:`~cacheblend_rag.blending.transfer.Transfer`).
    """

    def __init__(self, device: torch.device, limit: int | None = None):
        """Lock nothing yet; at most ``limit`` bytes for ``device`` (None: no limit)."""
        self._module = torch.get_device_module(device)
        # Page-locking opens the thread's current device, which in a new thread is the first one.
        self._index = self._module.current_device() if device.index is None else device.index
        self.limit = limit
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []  # of each slab, (offset, size) in ascending order
        self._returned: deque[tuple[int, int, int]] = deque()  # appended to by garbage collection, so without a lock
        self._lock = threading.Lock()
        self._growing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return the bytes page-locked so far."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a block ``[nbytes]``, uint8, contents undefined; None if no such piece is free. Never locks any more."""
        size = max(nbytes + -nbytes % _ALIGNMENT, _ALIGNMENT)
        with self._lock:
            self._take_back()
            place = self._fit(size)
        if place is None:
            return None
        slab, offset = place
        block = self._slabs[slab][offset : offset + nbytes]
        weakref.finalize(block, self._returned.append, (slab, offset, size)).atexit = False
        with torch.inference_mode(False):  # other threads, which are in no such mode, will write to it
            return torch.from_numpy(block)

    def grow(self, nbytes: int) -> bool:
        """Page-lock one more slab, with room for a block of ``nbytes``; return whether the limit allowed it (blocking)."""
        with self._growing:
            room = SLAB if self.limit is None else self.limit - self.nbytes
            # What is left below a slab is used in powers of two, since it would be rounded to the next one.
            size = max(nbytes + -nbytes % _ALIGNMENT, min(SLAB, 1 << max(room, 1).bit_length() - 1))
            if self.limit is not None and size > room:
                return False
            try:
                with self._module.device(self._index):
                    slab = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                _log.warning(
                    "No more than %d bytes can be page-locked; the rest of the KV is read more slowly: %s",
                    self.nbytes,
                    error,
                )
                self.limit = self.nbytes
                return False
            with self._lock:
                self._slabs.append(slab)
                self._free.append([(0, size)])
            return True

    def grow_ahead(self) -> None:
        """Have a thread lock the next slab, if less than one is free and none is under way: the next block shall not wait."""
        if self._is_short() and not self._growing.locked():
            grow = threading.Thread(
                target=lambda: self._is_short() and self.grow(1), name="cacheblend-page-lock", daemon=True
            )
            grow.start()

    def _is_short(self) -> bool:
        with self._lock:
            self._take_back()
            free = sum(size for pieces in self._free for _, size in pieces)
        # The last bit of a budget is not worth a slab, and a thread, of its own.
        return free < SLAB and (self.limit is None or self.limit - self.nbytes >= max(1, min(SLAB, self.limit // 8)))

    def is_full_for(self, nbytes: int) -> bool:
        """Say whether a block of ``nbytes`` would fit, if others were given back, and no slab may be added for it."""
        if self.limit is None or self.limit - self.nbytes >= nbytes:
            return False
        return any(slab.nbytes >= nbytes + -nbytes % _ALIGNMENT for slab in self._slabs)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether ``tensor`` lies in a block of this memory."""
        at = tensor.data_ptr()
        return any(slab.ctypes.data <= at < slab.ctypes.data + slab.nbytes for slab in self._slabs)

    def _fit(self, size: int) -> tuple[int, int] | None:
        for slab, pieces in enumerate(self._free):
            for index, (offset, free) in enumerate(pieces):
                if free >= size:
                    pieces[index : index + 1] = [(offset + size, free - size)] if free > size else []
                    return slab, offset
        return None

    def _take_back(self) -> None:
        while self._returned:
            slab, offset, size = self._returned.popleft()
            pieces = sorted([*self._free[slab], (offset, size)])
            joined: list[tuple[int, int]] = []
            for begin, length in pieces:
                if joined and sum(joined[-1]) == begin:
                    joined[-1] = joined[-1][0], joined[-1][1] + length
                else:
                    joined.append((begin, length))
            self._free[slab] = joined


@dataclass
class _Held:
    kv: ChunkKV | CodedKV
    last_used: float


class MemoryStore(KVStore, Listing, Evicting, Reporting, PageLocking):
    """Keeps KV entries in host memory under a byte budget, least recently used out first, as they are or in whole numbers.

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
            every = list(self._held.items())
        for key, entry in every:
            held = entry.kv.held
            if (room := self.room(nbytes_of(held.layers), wait=True)) is not None:
                self._keep(key, _like(entry.kv, packed(held.layers, Pieces(room))), replace=True)
        self._page_locked.grow_ahead()

    def room(self, nbytes: int, wait: bool = False) -> torch.Tensor | None:
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

    def get(self, key: KVKey) -> ChunkKV | CodedKV | None:
        """See :meth:`KVStore.get`. Every caller gets the same memory."""
        with self._lock:
            held = self._use(key)
        self._events.add("misses" if held is None else "hits")
        return held.kv if held else None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. What is not in contiguous layers, or keeps more alive than itself, is copied."""
        with self._lock:
            if not replace and self._use(key):
                return True
        rows = None if self.format.codec.in_place else coded(kv)
        new = kv if rows is None else CodedKV(kv.whole(rows), kv.layers[0].k.dtype)
        if not self._fits(new.stored_nbytes):
            return False
        self._keep(key, _like(new, self._owned(new.held)), replace)
        return True

    def _keep(self, key: KVKey, kv: ChunkKV | CodedKV, replace: bool) -> None:
        with self._lock:
            if not replace and self._use(key):
                return
            self._remove(key)
            if self.budget is not None:
                self._evict(self.budget - kv.stored_nbytes)
            self._held[key] = _Held(kv, time.time())
            self._nbytes += kv.stored_nbytes
            self._on_change(key, kv.stored_nbytes)
        self._events.add("puts")

    def contains(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._held

    def delete(self, key: KVKey) -> bool:
        with self._lock:
            return self._remove(key) is not None

    def touch(self, key: KVKey) -> None:
        with self._lock:
            self._use(key)

    def entry(self, key: KVKey) -> EntryInfo | None:
        with self._lock:
            held = self._held.get(key)
            return None if held is None else EntryInfo(key, held.kv.stored_nbytes, self.tier, held.last_used)

    def entries(self) -> Iterator[EntryInfo]:
        """See :meth:`Listing.entries`; a snapshot."""
        with self._lock:
            snapshot = [
                EntryInfo(key, held.kv.stored_nbytes, self.tier, held.last_used) for key, held in self._held.items()
            ]
        return iter(snapshot)

    def evict(self, to_bytes: int) -> int:
        with self._lock:
            return self._evict(to_bytes)

    def stats(self) -> StoreStats:
        with self._lock:
            return self._stats(len(self._held), self._nbytes)

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

    def _remove(self, key: KVKey) -> _Held | None:
        held = self._held.pop(key, None)
        if held:
            self._nbytes -= held.kv.stored_nbytes
            self._on_change(key, 0)
        return held

    def _evict(self, to_bytes: int) -> int:
        before = self._nbytes
        while self._held and self._nbytes > to_bytes:
            self._remove(next(iter(self._held)))
            self._events.add("evictions")
        return before - self._nbytes


def _like(kv: ChunkKV | CodedKV, layers: Sequence[LayerKV]) -> ChunkKV | CodedKV:
    """Return an entry of the same numbers, whose memory is ``layers``."""
    held = kv.whole(layers)
    return CodedKV(held, kv.dtype) if isinstance(kv, CodedKV) else held
