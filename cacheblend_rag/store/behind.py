"""Writes behind: a bounded queue stands in front of a slow tier, so that whoever puts an entry does not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.block import packed
from cacheblend_rag.store.kv import ChunkKV, KVKey

_log = logging.getLogger(__name__)

MOST_WAITING = 1 << 30
"""Bytes of keys and values that wait in host memory for one tier."""


class _Waiting(NamedTuple):
    kv: ChunkKV
    replace: bool


class WriteQueue:
    """Holds entries on their way to a tier. They can be read here until they are there; what the tier refuses is let go.

    Thread-safe. A thread writes them one by one, and is waited for at the interpreter's end.
    """

    def __init__(self, tier: KVStore, on_refusal: Callable[[StoreError], None], most_bytes: int = MOST_WAITING):
        """Queue for ``tier``, which stays the caller's; tell ``on_refusal`` (from the thread) what it refuses."""
        self._tier, self._on_refusal, self._most = tier, on_refusal, most_bytes
        self._changed = threading.Condition()
        self._waiting: dict[KVKey, _Waiting] = {}
        self._nbytes = 0
        self._writing: KVKey | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-write")

    def put(self, key: KVKey, kv: ChunkKV, replace: bool) -> None:
        """Take a copy of an entry; waits while there is no room, unless nothing else is waiting."""
        copy = _Waiting(ChunkKV(packed(kv.layers), kv.start, static=kv.static_deviation()), replace)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._nbytes + kv.nbytes <= self._most)
            if key in self._waiting and not replace:
                return
            self._let_go(key)
            self._waiting[key] = copy
            self._nbytes += copy.kv.nbytes
            self._writer.submit(self._write, key)

    def get(self, key: KVKey) -> ChunkKV | None:
        """Return an entry that is not written yet."""
        with self._changed:
            found = self._waiting.get(key)
        return None if found is None else found.kv

    def cancel(self, key: KVKey) -> bool:
        """Let go of an entry; return whether it was here. One that is being written is written when this returns."""
        with self._changed:
            known = self._let_go(key)
            self._changed.wait_for(lambda: self._writing != key)
        return known

    def flush(self) -> None:
        """Wait until nothing is left to write."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._writing is None)

    def close(self) -> None:
        """Write what is left, and end."""
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
