"""A store with entries whose layers arrive only once an event is set."""

from __future__ import annotations

import threading

import torch

from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV


class _HeldUp(StoredKV):
    tier = "far"

    def __init__(self, kv: StoredKV, go_on: threading.Event):
        self._kv, self._go_on = kv, go_on
        self.num_layers, self.num_tokens, self.start = kv.num_layers, kv.num_tokens, kv.start
        self.nbytes, self.stored_nbytes = kv.nbytes, kv.stored_nbytes

    def layer(self, index: int) -> LayerKV:
        assert self._go_on.wait(60)
        return self._kv.layer(index)

    def static_deviation(self) -> torch.Tensor | None:
        return self._kv.static_deviation()


class HeldUpStore(MemoryStore):
    """RAM, except for the keys in ``far``: their layers arrive once ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.far: set[KVKey] = set()
        self.go_on = threading.Event()

    def get(self, key: KVKey) -> ChunkKV | None:
        found = super().get(key)
        if found is None or key not in self.far:
            return found
        return _HeldUp(found, self.go_on)  # type: ignore[return-value]
