"""Stores KV: one canonical, immutable copy of each chunk's KV cache, in RAM, on disk, in Redis, in an object store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, TierOptions, VerifyReport
    from cacheblend_rag.store.disk import DiskStore
    from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV
    from cacheblend_rag.store.kvfile import EntryFormat
    from cacheblend_rag.store.memory import MemoryStore
    from cacheblend_rag.store.opening import TierURL, open_store, record_tiers, recorded_tiers
    from cacheblend_rag.store.source import BytesSource, Keyring, make_key
    from cacheblend_rag.store.tiered import TieredStore

__all__ = [
    "BytesSource",
    "ChunkKV",
    "DiskStore",
    "EntryFormat",
    "EntryInfo",
    "KVKey",
    "KVStore",
    "Keyring",
    "LayerKV",
    "MemoryStore",
    "StoreStats",
    "StoredKV",
    "TierOptions",
    "TierURL",
    "TieredStore",
    "VerifyReport",
    "make_key",
    "open_store",
    "record_tiers",
    "recorded_tiers",
]

_HOMES = {
    "EntryInfo": "base",
    "KVStore": "base",
    "StoreStats": "base",
    "TierOptions": "base",
    "VerifyReport": "base",
    "DiskStore": "disk",
    "ChunkKV": "kv",
    "KVKey": "kv",
    "LayerKV": "kv",
    "StoredKV": "kv",
    "EntryFormat": "kvfile",
    "MemoryStore": "memory",
    "TierURL": "opening",
    "open_store": "opening",
    "record_tiers": "opening",
    "recorded_tiers": "opening",
    "BytesSource": "source",
    "Keyring": "source",
    "make_key": "source",
    "TieredStore": "tiered",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line reads answers of other processes without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
