"""Limits a store's reads to a given bandwidth, to simulate storage devices (paper figure 17)."""

from __future__ import annotations

import threading
import time

import torch

from cacheblend_rag.errors import InputError
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV


class _Device:
    """Simulates one queue of reads: concurrent reads run one after the other."""

    def __init__(self, bytes_per_s: float):
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            ready = self._free_at
        time.sleep(max(0.0, ready - time.perf_counter()))


class _SlowKV(StoredKV):
    tier = "device"

    def __init__(self, kv: StoredKV, device: _Device):
        self._kv, self._device = kv, device
        self.num_layers, self.num_tokens, self.start = kv.num_layers, kv.num_tokens, kv.start
        self.nbytes, self.stored_nbytes = kv.nbytes, kv.stored_nbytes

    def layer(self, index: int) -> LayerKV:
        found = self._kv.layer(index)
        self._device.read(found.k.nbytes + found.v.nbytes)
        return found

    def static_deviation(self) -> torch.Tensor | None:
        return self._kv.static_deviation()


class ThrottledStore(MemoryStore):
    """Stores KV in RAM that is read at ``bytes_per_s``, shared by all reads; latency is not simulated. Writes have full speed.

    Attributes:
        bytes_per_s: The bandwidth; may be changed between requests.
    """

    def __init__(self, bytes_per_s: float):
        """Open an empty store without a budget.

        Raises:
            InputError: The bandwidth is not above 0.
        """
        super().__init__()
        self.bytes_per_s = bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes read per second."""
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float) -> None:
        if not rate > 0:
            raise InputError(f"A bandwidth of {rate} bytes per second reads nothing; give more than 0.")
        self._bytes_per_s = rate
        self._device = _Device(rate)

    def get(self, key: KVKey) -> ChunkKV | None:
        """Return the entry of ``key`` as :meth:`KVStore.get` does; its layers are read at the device's rate."""
        found = super().get(key)
        return None if found is None else _SlowKV(found, self._device)  # type: ignore[return-value]
