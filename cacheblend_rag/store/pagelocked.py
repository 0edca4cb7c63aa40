"""Page-locks host memory: a device copies from and to it by itself, while processor and device go on with other work."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)

# Page-locking takes about as long as writing to the memory, so it is done in large slabs; PyTorch rounds them to powers of two.
SLAB = 1 << 29
_ALIGNMENT = 512


def can_page_lock(device: torch.device) -> bool:
    """Say whether ``device`` copies from page-locked memory by itself, which takes streams."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


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
