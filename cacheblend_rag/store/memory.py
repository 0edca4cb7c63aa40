"""Stores entries in RAM."""

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

from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, TierOptions, VerifyReport
from cacheblend_rag.store.codec import CodedKV, coded
from cacheblend_rag.store.kv import ALIGNMENT, ChunkKV, KVKey, LayerKV, Pieces, can_page_lock, flat, nbytes_of, packed

_log = logging.getLogger(__name__)

# Page-locking takes about as long as writing the memory, so slabs are large. PyTorch rounds slabs up to powers of two.
SLAB = 1 << 29
_ALIGNMENT = 512


class PageLockedMemory:
    """Allocates blocks of page-locked memory, and frees each block when no tensor views the block any more.

    Slabs are page-locked one after another on demand, and not released. No caller frees a block explicitly, and a block
    with a view is never allocated again. Copies by a device count as use only while some object holds a view of the
    source or target (see :class:`~cacheblend_rag.blending.transfer.Transfer`).
    """

    def __init__(self, device: torch.device, limit: int | None = None):
        """Set the limit to ``limit`` bytes for ``device`` (None: no limit); page-lock no memory yet."""
        self._module = torch.get_device_module(device)
        # Page-locking opens the thread's current device, which in a new thread is the first device.
        self._index = self._module.current_device() if device.index is None else device.index
        self.limit = limit
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []  # for each slab: (offset, size) in ascending order
        self._returned: deque[tuple[int, int, int]] = deque()  # garbage collection appends, so without a lock
        self._lock = threading.Lock()
        self._growing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return the bytes page-locked so far."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a block ``[nbytes]``, uint8, contents undefined; None if no free piece is large enough."""
        size = max(nbytes + -nbytes % _ALIGNMENT, _ALIGNMENT)
        with self._lock:
            self._take_back()
            place = self._fit(size)
        if place is None:
            return None
        slab, offset = place
        block = self._slabs[slab][offset : offset + nbytes]
        weakref.finalize(block, self._returned.append, (slab, offset, size)).atexit = False
        with torch.inference_mode(False):  # threads outside of inference mode will write to the memory
            return torch.from_numpy(block)

    def grow(self, nbytes: int) -> bool:
        """Page-lock another slab with room for a block of ``nbytes``; return whether the limit allowed it. Blocking."""
        with self._growing:
            room = SLAB if self.limit is None else self.limit - self.nbytes
            # A remainder below a slab is used in powers of two, because PyTorch rounds sizes up to powers of two.
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
        """Page-lock the next slab in a thread if less than a slab is free, so that the next block need not wait."""
        if self._is_short() and not self._growing.locked():
            grow = threading.Thread(
                target=lambda: self._is_short() and self.grow(1), name="cacheblend-page-lock", daemon=True
            )
            grow.start()

    def _is_short(self) -> bool:
        with self._lock:
            self._take_back()
            free = sum(size for pieces in self._free for _, size in pieces)
        # A small remainder of a budget is not worth another slab and another thread.
        return free < SLAB and (self.limit is None or self.limit - self.nbytes >= max(1, min(SLAB, self.limit // 8)))

    def is_full_for(self, nbytes: int) -> bool:
        """Return whether the limit allows no slab for ``nbytes``, but freeing other blocks can make enough room."""
        if self.limit is None or self.limit - self.nbytes >= nbytes:
            return False
        return any(slab.nbytes >= nbytes + -nbytes % _ALIGNMENT for slab in self._slabs)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in a block of this memory."""
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


class MemoryStore(KVStore):
    """Stores KV entries in host memory under a byte budget, unchanged or as int8; evicts the least recently used first.

    Every layer is one contiguous block. After :meth:`page_lock_for` the blocks are page-locked for a device.
    """

    lasts = False
    lists = True

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
        """Call ``listener`` with the key and bytes of each changed entry, 0 if removed; it must not use the store."""
        self._on_change = listener

    def page_lock_for(self, device: torch.device) -> None:
        """See :meth:`KVStore.page_lock_for`. Entries beyond the limit of page-locking lie in ordinary memory."""
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
        """See :meth:`KVStore.get`. All callers share the same memory."""
        with self._lock:
            held = self._use(key)
        self._events.add("misses" if held is None else "hits")
        return held.kv if held else None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`. Layers that are not contiguous, or that are views of larger memory, are copied."""
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
        """Count the entries. Entries in memory have no checksums, so no damage can be found."""
        with self._lock:
            return VerifyReport(len(self._held), ())

    def close(self) -> None:
        """Release every entry."""
        with self._lock:
            self._held.clear()
            self._nbytes = 0

    def _owned(self, kv: ChunkKV) -> Sequence[LayerKV]:
        """Return the layers in host memory that nothing else shares: unchanged, or a copy in one block."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for layer in kv.layers for x in layer}
        in_blocks = all(layer.k.device.type == "cpu" and flat(layer) is not None for layer in kv.layers)
        alone = in_blocks and sum(storages.values()) <= kv.nbytes + len(kv.layers) * ALIGNMENT
        if alone and (self._page_locked is None or all(self._page_locked.holds(layer.k) for layer in kv.layers)):
            return kv.layers
        # `room` does not wait here, because a request may be moving the entry up into this tier.
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
    """Return an entry with the same numbers in the memory of ``layers``."""
    held = kv.whole(layers)
    return CodedKV(held, kv.dtype) if isinstance(kv, CodedKV) else held
