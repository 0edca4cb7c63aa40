"""The SQLite file of the chunks registered with a server over HTTP, of any number of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.matching import Indices, Signatures
from cacheblend_rag.retrieval.sqlite import SQLiteFile, chunk_row, row_chunk
from cacheblend_rag.store.private import make_root

FILE_NAME = "registered.sqlite"
_TABLE = """
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, so a row says whether a chunk is new
    name TEXT NOT NULL, model TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, metadata TEXT NOT NULL,
    signature BLOB NOT NULL,
    checksum BLOB NOT NULL,  -- of all other columns but id
    UNIQUE (model, name)
)
"""
# Else all texts would have to be read for them.
_SIGNATURES = "CREATE INDEX signatures ON chunks (model, id, signature)"


_COLUMNS = "name, model, text, token_ids, metadata"


def _upgrade(order: str) -> Callable[[RegisteredChunks], None]:
    """Return what makes the table anew, with chunks in that order: format 1 had no rows and signatures, 2 no checksums."""

    def upgrade(file: RegisteredChunks) -> None:
        file.db.execute("ALTER TABLE chunks RENAME TO former")
        file.db.execute(_TABLE)
        file.db.execute(
            f"INSERT INTO chunks ({_COLUMNS}, signature, checksum) SELECT {_COLUMNS}, x'', x'' FROM former ORDER BY {order}"
        )
        file.db.execute("DROP TABLE former")
        file.sign("chunks")
        file.db.create_function("checksum", 6, _checksum, deterministic=True)
        file.db.execute(f"UPDATE chunks SET checksum = checksum({_COLUMNS}, signature)")
        file.db.execute(_SIGNATURES)

    return upgrade


def _checksum(name: str, model: str, text: str, token_ids: bytes, metadata: str, signature: bytes) -> bytes:
    """Return what changes with any byte of a row: it finds damage, and does not keep out who may write the file."""
    texts = json.dumps([name, model, text, metadata, len(token_ids)]).encode()
    return xxhash.xxh3_128_digest(texts + token_ids + signature)


class RegisteredChunks(SQLiteFile):
    """One model's registered chunks in a store directory; unlike the index, without documents and vectors.

    Thread-safe; several servers may share the file. It has a rollback journal, which works on a network file system with
    locks, as WAL does not.
    """

    name = "the file of registered chunks"
    kind = "a file of registered chunks"
    start_over = "To start over, delete it and register the chunks again; their stored KV is kept."
    format = 3
    schema = f"{_TABLE};\n{_SIGNATURES}"
    upgrades: ClassVar[Mapping[int, Callable[[Any], None]]] = {1: _upgrade("name"), 2: _upgrade("id")}
    busy_timeout_s = 30.0  # a client waits for it

    def __init__(self, directory: Path | None, model: str):
        """Open the file in ``directory``, made if missing; None keeps the chunks in memory until :meth:`close`.

        Args:
            directory: The store directory.
            model: Digest of the model whose chunks are read and changed; those of others stay as they are.

        Raises:
            StoreError: It cannot be used.
            StoreMismatchError: It has another format.
        """
        super().__init__((directory or Path()) / FILE_NAME)
        self._model = model
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

    @property
    def generation(self) -> Hashable:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        with self.access():
            return self.others_commits(), self.db.total_changes

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return self.read_signatures(
            "SELECT id, signature FROM chunks INDEXED BY signatures WHERE model = ? AND id > ? ORDER BY id",
            self._model,
            after,
        )

    def chunk_at(self, row: int) -> Chunk | None:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return next(iter(self._read("id = ?", row)), None)

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        # CROSS: the names first, or SQLite may go through all chunks.
        query = "SELECT c.name FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value WHERE c.model = ?"
        return {name for (name,) in self.rows(query, json.dumps(list(chunk_ids)), self._model)}

    def named(self, chunk_id: str) -> Chunk | None:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return next(iter(self._read("name = ?", chunk_id)), None)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return self._read("name > ? ORDER BY name LIMIT ?", chunk_id, most)

    def count(self) -> int:
        """See :class:`~cacheblend_rag.prompts.registry.ChunkSource`."""
        return int(self.rows("SELECT count(*) FROM chunks WHERE model = ?", self._model)[0][0])

    def _read(self, which: str, *parameters: object) -> list[Chunk]:
        query = f"SELECT {_COLUMNS}, signature, checksum FROM chunks WHERE model = ? AND {which}"
        with self.decoding():
            return [self._checked(*row) for row in self.rows(query, self._model, *parameters)]

    def _checked(
        self, name: str, model: str, text: str, token_ids: bytes, metadata: str, signature: bytes, checksum: bytes
    ) -> Chunk:
        if _checksum(name, model, text, token_ids, metadata, signature) != checksum:
            raise self.damaged(f"the chunk {name!r} does not have its checksum")
        return row_chunk(name, text, token_ids, metadata)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Keep chunks, each in place of one with its id.

        Raises:
            StoreError: They cannot be written; none is kept.
        """
        query = f"INSERT OR REPLACE INTO chunks ({_COLUMNS}, signature, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)"
        rows = []
        for name, text, token_ids, metadata, signature in map(chunk_row, chunks):
            row = (name, self._model, text, token_ids, metadata, signature)
            rows.append((*row, _checksum(*row)))
        with self.transaction():
            self.db.executemany(query, rows)

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Remove chunks; unknown ids are ignored.

        Raises:
            StoreError: The file cannot be written; none is removed.
        """
        with self.transaction():
            rows = [(self._model, chunk_id) for chunk_id in chunk_ids]
            self.db.executemany("DELETE FROM chunks WHERE model = ? AND name = ?", rows)
