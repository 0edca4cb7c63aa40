"""Stores one canonical, immutable copy of each chunk's KV cache: in RAM, on disk, in Redis, in an object store."""

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

_MODULES = {
    "base": ("EntryInfo", "KVStore", "StoreStats", "TierOptions", "VerifyReport"),
    "disk": ("DiskStore",),
    "kv": ("ChunkKV", "KVKey", "LayerKV", "StoredKV"),
    "kvfile": ("EntryFormat",),
    "memory": ("MemoryStore",),
    "opening": ("TierURL", "open_store", "record_tiers", "recorded_tiers"),
    "source": ("BytesSource", "Keyring", "make_key"),
    "tiered": ("TieredStore",),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that programs that only read an index do not import torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
