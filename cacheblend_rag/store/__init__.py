"""Stores KV: one canonical, immutable copy of each chunk's KV cache, in RAM, on disk, in Redis, in an object store."""

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
