"""Moves entries between tiers: into faster tiers as entries are read, and into slower tiers by a thread after a put."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from cacheblend_rag.errors import DamagedKVError, StoreError, StoreUnavailableError
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.kv import ALIGNMENT, ChunkKV, KVKey, LayerKV, Pieces, StoredKV, Take, packed, plain

_log = logging.getLogger(__name__)


class Promotion(StoredKV):
    """Collects the layers that are read through it and puts the complete entry into the faster tiers.

    A promotion therefore costs no further read, and no copy if a tier provides memory to read into. The faster tier's
    budget limits the bytes of all unfinished promotions together: entries beyond the budget are read without promotion.
    """

    def __init__(self, key: KVKey, source: StoredKV, targets: Sequence[KVStore], on_end: Callable[[int], None]):
        """Read from ``source``; call ``on_end`` once, with its size, when the promotion ends or is abandoned."""
        self._key = key
        self._source = source
        self._targets = targets
        self._layers: dict[int, LayerKV] = {}
        self._take: Take | None = None
        self._lock, self._putting = threading.Lock(), threading.Lock()
        self.num_layers = source.num_layers
        self.num_tokens = source.num_tokens
        self.start, self.exact = source.start, source.exact
        self.nbytes, self.stored_nbytes = source.nbytes, source.stored_nbytes
        self.tier = source.tier
        self.at_once = source.at_once
        self._end = weakref.finalize(self, on_end, source.nbytes)

    def layer(self, index: int) -> LayerKV:
        with self._lock:
            held = self._layers.get(index)
            if held is None and self._take is None:
                self._take = self._room()
        if held is not None:
            return held
        assert self._take is not None
        layer = self._source.layer_in(index, self._take)
        with self._lock:
            complete = index not in self._layers and len(self._layers) == self.num_layers - 1
            self._layers.setdefault(index, layer)
        if complete:
            # RAM gets the entry at once, without a copy. A write to a medium would delay the reader of the layer.
            self._promote(lasting=False)
            if not any(tier.lasts for tier in self._targets):
                self._end()
        return layer

    def static_deviation(self) -> torch.Tensor | None:
        return self._source.static_deviation()

    def finish(self) -> None:
        """See :meth:`StoredKV.finish`: read the layers that the blend skipped, such as those below the check layer."""
        try:
            for index in range(self.num_layers):
                self.layer(index)
        except (DamagedKVError, StoreUnavailableError) as error:  # the answer did not use the layers read here
            _log.warning("KV entry %s stays in the %s tier: %s", self._key, self.tier, error)
            return
        self._promote(lasting=True)
        self._end()

    def _room(self) -> Take:
        nbytes = self.nbytes + self.num_layers * ALIGNMENT
        rooms = (tier.room(nbytes) for tier in self._targets)
        room = next((room for room in rooms if room is not None), None)
        return plain if room is None else Pieces(room)

    def give_up(self, key: KVKey) -> None:
        """Stop the promotion if ``key``, which is being deleted, is the promotion's key; wait for a running put."""
        if key == self._key:
            with self._putting:
                self._targets = ()

    def _promote(self, lasting: bool) -> None:
        if not any(tier.lasts == lasting for tier in self._targets):
            return
        kv = self.whole([self._layers[index] for index in range(self.num_layers)])
        with self._putting:
            for tier in self._targets:
                if tier.lasts != lasting:
                    continue
                try:
                    tier.put(self._key, kv)
                except StoreUnavailableError:
                    pass  # the tier has logged the error
                except StoreError as error:  # the read itself succeeded
                    _log.warning("KV entry %s stays in the %s tier: %s", self._key, self.tier, error)


MOST_WAITING = 1 << 30
"""Most bytes of keys and values that wait in host memory for one tier."""


class _Waiting(NamedTuple):
    kv: ChunkKV
    replace: bool


class WriteQueue:
    """Queues entries for a tier. The queue serves entries until they are written; refused entries are dropped.

    Thread-safe. A thread writes the entries one by one. The interpreter waits for the thread before it exits.
    """

    def __init__(self, tier: KVStore, on_refusal: Callable[[StoreError], None], most_bytes: int = MOST_WAITING):
        """Queue for ``tier``, which the caller closes; the thread calls ``on_refusal`` with each error of the tier."""
        self._tier, self._on_refusal, self._most = tier, on_refusal, most_bytes
        self._changed = threading.Condition()
        self._waiting: dict[KVKey, _Waiting] = {}
        self._nbytes = 0
        self._writing: KVKey | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-write")

    def put(self, key: KVKey, kv: ChunkKV, replace: bool) -> None:
        """Queue a copy of an entry; wait while the queue is full, unless no other entry is waiting.

        Without ``replace`` an entry that is queued already stays, and the call neither copies nor waits.
        """
        if not replace and self.get(key) is not None:
            return
        copy = _Waiting(kv.whole(packed(kv.layers)), replace)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._nbytes + kv.nbytes <= self._most)
            if key in self._waiting and not replace:  # another thread was faster
                return
            self._let_go(key)
            self._waiting[key] = copy
            self._nbytes += copy.kv.nbytes
            self._writer.submit(self._write, key)

    def get(self, key: KVKey) -> ChunkKV | None:
        """Return an entry that is not written yet, or None."""
        with self._changed:
            found = self._waiting.get(key)
        return None if found is None else found.kv

    def cancel(self, key: KVKey) -> bool:
        """Drop an entry and return whether it was queued; wait until a running write of the entry has ended."""
        with self._changed:
            known = self._let_go(key)
            self._changed.wait_for(lambda: self._writing != key)
        return known

    def flush(self) -> None:
        """Wait until all queued entries are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._writing is None)

    def close(self) -> None:
        """Write the queued entries, and end the thread."""
        self._writer.shutdown(wait=True)

    def _write(self, key: KVKey) -> None:
        with self._changed:
            entry = self._waiting.get(key)
            if entry is None:
                return
            self._writing = key
        try:
            self._tier.put(key, entry.kv, entry.replace)
        except StoreError as error:
            self._on_refusal(error)
        except Exception:
            _log.exception("KV entry %s could not be written behind", key)
        finally:
            with self._changed:
                self._writing = None
                if self._waiting.get(key) is entry:
                    self._let_go(key)
                self._changed.notify_all()

    def _let_go(self, key: KVKey) -> bool:
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.kv.nbytes
            self._changed.notify_all()
        return entry is not None
