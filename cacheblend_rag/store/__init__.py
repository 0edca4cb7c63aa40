"""KV stores: one canonical, immutable copy of each chunk's KV cache, in RAM and on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cacheblend_rag.store.base import EntryInfo, KVStore, StoreStats, VerifyReport
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.tiered import TieredStore

__all__ = [
    "ChunkKV",
    "DiskStore",
    "EntryInfo",
    "KVKey",
    "KVStore",
    "LayerKV",
    "MemoryStore",
    "StoreStats",
    "TieredStore",
    "VerifyReport",
    "default_ram_budget",
    "open_store",
]


def default_ram_budget(processes: int = 1) -> int:
    """Return how many bytes of KV each of ``processes`` on this machine may hold in RAM: together a quarter of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // processes


def open_store(
    path: Path | str | None = None, ram_budget: int | None = None, disk_budget: int | None = None
) -> KVStore:
    """Open the usual store: RAM in front of the disk, or RAM alone.

    Args:
        path: Directory of the disk tier, made where it is missing; None for no disk tier.
        ram_budget: Bytes of KV held in RAM; None for a quarter of the machine's memory.
        disk_budget: Bytes of KV held on disk; None for half of what the disk has free besides what the store holds.

    Raises:
        StoreError: ``path`` is not a directory or cannot be made.
    """
    if ram_budget is None:
        ram_budget = default_ram_budget()
    ram = MemoryStore(ram_budget)
    if path is None:
        return ram
    path = Path(path).expanduser()
    disk = DiskStore(path)
    if disk_budget is None:
        # Counting what it holds as free keeps the budget the same however full the store is.
        disk_budget = (shutil.disk_usage(path).free + disk.stats().nbytes) // 2
    disk.budget = disk_budget
    return TieredStore([ram, disk])
