"""Stores the chunks registered with a server over HTTP in SQLite, for any number of models and namespaces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.matching import Indices, Signatures
from cacheblend_rag.retrieval.documents import REGISTERED_FILE
from cacheblend_rag.retrieval.sqlite import SQLiteFile, chunk_row, row_chunk
from cacheblend_rag.store.files import DEFAULT_NAME, make_root

_TABLE = """
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, so a row says whether a chunk is new
    name TEXT NOT NULL, model TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, metadata TEXT NOT NULL,
    signature BLOB NOT NULL,
    namespace TEXT NOT NULL,
    kv_bytes INTEGER NOT NULL,  -- size of its KV when it was registered
    expires REAL,  -- seconds since the epoch
    checksum BLOB NOT NULL,  -- of all other columns but id
    UNIQUE (model, namespace, name)
)
"""
# Without the index, reading the signatures would read all texts.
_SIGNATURES = "CREATE INDEX signatures ON chunks (model, namespace, id, signature)"
_EXPIRY = "CREATE INDEX expiry ON chunks (model, namespace, expires) WHERE expires IS NOT NULL"
_SIZES = "CREATE INDEX sizes ON chunks (model, namespace, kv_bytes)"
# Clients of one namespace share chunks: a client that releases a chunk must not remove the chunk for the others.
_HOLDERS = """
CREATE TABLE holders (
    model TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, holder TEXT NOT NULL,
    PRIMARY KEY (model, namespace, name, holder)
) WITHOUT ROWID
"""
_MOST_HOLDERS = 64  # of one chunk: holders count in no quota
_COLUMNS = "name, model, text, token_ids, metadata"
# CROSS JOIN reads the names first; otherwise SQLite may scan all chunks.
_NAMED = "FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value WHERE c.model = ? AND c.namespace = ?"
_OWN = "signature, namespace, kv_bytes, expires"


def _checksum(
    name: str, model: str, text: str, token_ids: bytes, metadata: str, signature: bytes, *own: str | float | None
) -> bytes:
    """Return a checksum of all bytes of a row; it finds damage, but does not keep out anyone who may write the file."""
    texts = json.dumps([name, model, text, metadata, len(token_ids), *own]).encode()
    return xxhash.xxh3_128_digest(texts + token_ids + signature)


class ConflictError(InputError):
    """Reports that a chunk cannot be changed in the requested way."""

    @classmethod
    def of_id(cls, name: str) -> ConflictError:
        """Return the error for an id that belongs to another text."""
        return cls(f"The id {name!r} belongs to another text. Delete that chunk first, or use another id.")


class RegisteredChunks(SQLiteFile):
    """Stores the registered chunks of one model and namespace in a store directory, without documents and vectors.

    Thread-safe; several servers may share the file. A method that cannot write the file raises StoreError, and changes
    nothing. The file has a rollback journal, which works on a network file
    system with locks; WAL does not.
    """

    name = "the file of registered chunks"
    kind = "a file of registered chunks"
    start_over = "To start over, delete it and register the chunks again; their stored KV is kept."
    format = 6
    schema = f"{_TABLE};\n{_SIGNATURES};\n{_EXPIRY};\n{_SIZES};\n{_HOLDERS}"
    busy_timeout_s = 30.0  # a client waits for the lock

    def __init__(self, directory: Path | None, model: str, namespace: str = DEFAULT_NAME):
        """Open the file in the store ``directory``, made if missing; None holds chunks in memory until :meth:`close`.

        Chunks of other models (by digest) and of other namespaces (by name) stay as they are.

        Raises:
            StoreError: The file cannot be used.
            StoreMismatchError: The file has another format.
        """
        super().__init__((directory or Path()) / REGISTERED_FILE)
        self._of = model, namespace
        with self.explained("open"):
            if directory is not None:
                make_root(directory)
            self.db = self.connect("memory" if directory is None else "rwc")
            try:
                with self.transaction():
                    self.make_tables()
                self.check_format()
            except BaseException:
                self.db.close()
                raise

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        return self.read_signatures(
            "SELECT id, signature FROM chunks INDEXED BY signatures WHERE model = ? AND namespace = ? AND id > ? ORDER BY id",
            *self._of,
            after,
        )

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        return {name for (name,) in self.rows(f"SELECT c.name {_NAMED}", json.dumps(list(chunk_ids)), *self._of)}

    def count(self) -> int:
        return int(self.rows("SELECT count(*) FROM chunks WHERE model = ? AND namespace = ?", *self._of)[0][0])

    def find_chunks(self, which: str, *parameters: object) -> list[Chunk]:
        query = f"SELECT {_COLUMNS}, {_OWN}, checksum FROM chunks WHERE model = ? AND namespace = ? AND {which}"
        with self.decoding():
            return [self._checked(*row) for row in self.rows(query, *self._of, *parameters)]

    def _checked(self, *row: Any) -> Chunk:
        *fields, checksum = row
        name, _, text, token_ids, metadata, *_ = fields
        if _checksum(*fields) != checksum:
            raise self.damaged(f"the chunk {name!r} does not have its checksum")
        return row_chunk(name, text, token_ids, metadata)

    def kv_bytes(self, but: Sequence[str] = ()) -> int:
        """Return the total KV size of all chunks, as registered, without the chunks whose ids are in ``but``."""
        every = "SELECT coalesce(sum(kv_bytes), 0) FROM chunks INDEXED BY sizes WHERE model = ? AND namespace = ?"
        query = f"SELECT ({every}) - (SELECT coalesce(sum(c.kv_bytes), 0) {_NAMED})"
        return int(self.rows(query, *self._of, json.dumps(list(but)), *self._of)[0][0])

    def expire(self, now: float) -> list[Chunk]:
        """Remove and return the chunks that have expired at ``now``, in seconds since the epoch."""
        if not self.find_chunks("expires <= ? LIMIT 1", now):
            return []
        with self.transaction():
            gone = self.find_chunks("expires <= ?", now)
            self._delete(chunk.id for chunk in gone)
        return gone

    def add(
        self,
        chunks: Iterable[Chunk],
        kv_bytes: Mapping[str, int] = MappingProxyType({}),
        expires: float | None = None,
        holder: str = "",
        check_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Store chunks; each chunk replaces a stored chunk with the same id and text.

        Args:
            chunks: Chunks to store.
            kv_bytes: Size of the chunks' KV by chunk id; 0 for ids that are missing.
            expires: Expiry time of the chunks in seconds since the epoch; None for never.
            holder: Additional holder of the chunks.
            check_room: Raises an error if there is no room for the chunks; called while nobody else can register
                chunks.

        Raises:
            ConflictError: An id belongs to another text; no chunk is stored.
            InputError: A chunk has too many holders; no chunk is stored.
            StoreError: The chunks cannot be written; no chunk is stored.
        """
        query = f"INSERT OR REPLACE INTO chunks ({_COLUMNS}, {_OWN}, checksum) VALUES ({', '.join('?' * 10)})"
        model, namespace = self._of
        rows = []
        for name, text, token_ids, metadata, signature in map(chunk_row, chunks):
            row = (name, model, text, token_ids, metadata, signature, namespace, kv_bytes.get(name, 0), expires)
            rows.append((*row, _checksum(*row)))
        texts = {row[0]: row[2] for row in rows}
        crowded = (
            "SELECT j.value FROM json_each(?) j WHERE "
            "(SELECT count(*) FROM holders WHERE model = ? AND namespace = ? AND name = j.value) > ? LIMIT 1"
        )
        with self.transaction():
            check_room()
            for name, text in self.rows(f"SELECT c.name, c.text {_NAMED}", json.dumps(list(texts)), *self._of):
                if text != texts[name]:
                    raise ConflictError.of_id(name)
            self.db.executemany(query, rows)
            held = [(model, namespace, row[0], holder) for row in rows]
            self.db.executemany("INSERT OR IGNORE INTO holders VALUES (?, ?, ?, ?)", held)
            for (name,) in self.rows(crowded, json.dumps(list(texts)), *self._of, _MOST_HOLDERS):
                raise InputError(
                    f"{_MOST_HOLDERS} clients hold the chunk {name!r}, as many as may. Have one let go of it (DELETE with "
                    "&holder=NAME), or register it under a name that holds it."
                )

    def release(self, chunk_ids: Sequence[str], holder: str) -> list[str]:
        """Note that ``holder`` no longer holds chunks; return the ids of the given chunks that have no holder."""
        which = "model = ? AND namespace = ? AND name = ?"
        with self.transaction():
            rows = [(*self._of, name, holder) for name in chunk_ids]
            self.db.executemany(f"DELETE FROM holders WHERE {which} AND holder = ?", rows)
            query = f"SELECT 1 FROM holders WHERE {which} LIMIT 1"
            return [name for name in chunk_ids if self.db.execute(query, (*self._of, name)).fetchone() is None]

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Remove chunks; unknown ids are ignored."""
        with self.transaction():
            self._delete(chunk_ids)

    def _delete(self, chunk_ids: Iterable[str]) -> None:
        rows = [(*self._of, chunk_id) for chunk_id in chunk_ids]
        for table in ("chunks", "holders"):
            self.db.executemany(f"DELETE FROM {table} WHERE model = ? AND namespace = ? AND name = ?", rows)
