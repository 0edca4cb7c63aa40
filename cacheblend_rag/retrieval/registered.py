"""The SQLite file of the chunks registered with a server over HTTP, of any number of models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.sqlite import SQLiteFile, chunk_row, row_chunk

FILE_NAME = "registered.sqlite"


class RegisteredChunks(SQLiteFile):
    """The registered chunks of a store directory; unlike the index, without documents and vectors.

    Thread-safe; several servers may share the file. It has a rollback journal, which works on a network file system with
    locks, as the index's WAL does not.
    """

    name = "the file of registered chunks"
    kind = "a file of registered chunks"
    start_over = "To start over, delete it and register the chunks again; their stored KV is kept."
    format = 1
    schema = (
        "CREATE TABLE chunks (name TEXT NOT NULL, model TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, "
        "metadata TEXT NOT NULL, PRIMARY KEY (model, name)) WITHOUT ROWID"
    )
    busy_timeout_s = 30.0  # a client waits for it

    def __init__(self, directory: Path | None):
        """Open the file in ``directory``, made if missing; None keeps the chunks in memory until :meth:`close`.

        Raises:
            StoreError: It cannot be used.
            StoreMismatchError: It has another format.
        """
        super().__init__((directory or Path()) / FILE_NAME)
        with self.explained("open"):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self.db = self.connect("memory" if directory is None else "rwc")
            try:
                with self.transaction():
                    self.make_tables()
                self.check_format()
            except BaseException:
                self.db.close()
                raise

    def read(self, model: str) -> list[Chunk]:
        """Return the chunks of the model with that digest, in the order of their ids.

        Raises:
            StoreError: They cannot be read.
        """
        query = "SELECT name, text, token_ids, metadata FROM chunks WHERE model = ? ORDER BY name"
        with self.decoding():
            return [row_chunk(*row) for row in self.rows(query, model)]

    def add(self, model: str, chunks: Iterable[Chunk]) -> None:
        """Keep chunks for a model, each in place of one with its id.

        Raises:
            StoreError: They cannot be written; none is kept.
        """
        query = "INSERT OR REPLACE INTO chunks (name, text, token_ids, metadata, model) VALUES (?, ?, ?, ?, ?)"
        rows = [(*chunk_row(chunk), model) for chunk in chunks]
        with self.transaction():
            self.db.executemany(query, rows)

    def remove(self, model: str, chunk_ids: Iterable[str]) -> None:
        """Remove chunks of a model; unknown ids are ignored.

        Raises:
            StoreError: The file cannot be written; none is removed.
        """
        with self.transaction():
            rows = [(model, chunk_id) for chunk_id in chunk_ids]
            self.db.executemany("DELETE FROM chunks WHERE model = ? AND name = ?", rows)
