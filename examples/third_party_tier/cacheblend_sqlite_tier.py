"""Keeps KV entries in an SQLite file: a tier of cacheblend-rag's KV store in a package of its own.

It has the six methods that every tier must have and none of what some can do besides: it cannot list or evict.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store import BytesSource, ChunkKV, EntryInfo, KVKey, KVStore, StoredKV, TierOptions, TierURL


def open_tier(address: TierURL, **options: Unpack[TierOptions]) -> KVStore:
    """Open the tier at an address such as ``sqlite:///var/kv.db?budget=2GiB``.

    Raises:
        InputError: The address names no file, or has an option that this tier does not know.
        StoreError: The file cannot be opened.
    """
    if not address.place or address.config:
        raise InputError(
            f"{address.url!r}: write it as sqlite:///path/to/kv.db, with budget, codec or encrypt if wanted."
        )
    return SQLiteStore(Path(address.place), address.budget, **options)


class SQLiteStore(KVStore):
    """Keeps each entry as a row. A put that does not fit into the budget is refused: nothing is evicted for it."""

    def __init__(self, file: Path, budget: int | None = None, **options: Unpack[TierOptions]):
        """Open ``file``, made where it is missing.

        Raises:
            StoreError: It cannot be opened.
        """
        options.setdefault("tier", "sqlite")
        super().__init__(budget, **options)
        self._file, self._lock = file, threading.Lock()
        try:
            self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise StoreError(f"cannot open the KV store {file}: {error}; check the path") from error
        self._run("CREATE TABLE IF NOT EXISTS kv (key TEXT PRIMARY KEY, data BLOB NOT NULL)")

    def get(self, key: KVKey) -> StoredKV | None:
        """See :meth:`KVStore.get`; the entry is read whole, so that readers keep it when it is deleted."""
        found: list[Any] = []
        with suppress(StoreError):  # what cannot be read now is a miss
            found = self._run("SELECT data FROM kv WHERE key = ?", key)
        source = BytesSource(found[0][0], f"{self._file}, {key}") if found else None
        return self._found(key, source, on_damage=lambda *_: self.delete(key))

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        """See :meth:`KVStore.put`."""
        if not replace and self.contains(key):
            return True
        data = self.format.serialized(self.format.encode(key, kv))
        room = -1 if self.budget is None else self.budget - len(data)
        # One statement, so that several processes keep the budget together.
        written = self._run(
            "INSERT OR REPLACE INTO kv SELECT ?, ?"
            " WHERE ? OR (SELECT coalesce(sum(length(data)), 0) FROM kv WHERE key != ?) <= ? RETURNING 1",
            *(key, data, self.budget is None, key, room),
        )
        self._events.add("puts", len(written))
        return bool(written)

    def contains(self, key: KVKey) -> bool:
        """See :meth:`KVStore.contains`."""
        with suppress(StoreError):
            return bool(self._run("SELECT 1 FROM kv WHERE key = ?", key))
        return False

    def delete(self, key: KVKey) -> bool:
        """See :meth:`KVStore.delete`."""
        return bool(self._run("DELETE FROM kv WHERE key = ? RETURNING 1", key))

    def entry(self, key: KVKey) -> EntryInfo | None:
        """See :meth:`KVStore.entry`; times of use are not kept."""
        found = self._run("SELECT length(data) FROM kv WHERE key = ?", key)
        return EntryInfo(key, found[0][0], self.tier, 0.0) if found else None

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot use the KV store {self._file}: {error}; check the file and its disk") from error
