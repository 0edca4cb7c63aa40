"""Holds the common parts of the library's SQLite files: opening, transactions, error messages, a chunk's row.

The modules of the two files define the tables: ``database.py`` (the index) and ``registered.py`` (the server's chunks).
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import xxhash

from cacheblend_rag.errors import StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import Chunk, pack_ids
from cacheblend_rag.prompts.matching import SIGNATURE, Indices, Signatures, signatures_of
from cacheblend_rag.prompts.registry import ChunkSource
from cacheblend_rag.store.closing import Closing
from cacheblend_rag.store.files import create_file

_ROWS_AT_ONCE = 1 << 16


class SQLiteFile(ChunkSource, Closing):
    """Connects one process to one SQLite file of chunks; a subclass defines the tables and opens the file.

    Attributes:
        path: Path of the file.
        lock: Lock for the threads of this process; :meth:`access` holds the lock.
        db: Connection in autocommit mode; :meth:`transaction` makes transactions.
        name: Name of the file in messages, with "the".
        kind: Kind of the file in messages, with "a" or "an".
        start_over: Sentence that tells the user what to do about a damaged file.
        format: Format of the tables, which the file holds as its ``user_version``.
        schema: Statements that make the tables, separated by ";" at a line's end.
        busy_timeout_s: Seconds to wait for another process that is writing.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    start_over: ClassVar[str]
    format: ClassVar[int]
    schema: ClassVar[str]
    busy_timeout_s: ClassVar[float] = 60.0
    db: sqlite3.Connection

    def __init__(self, path: Path):
        """Set the path of the file; the subclass connects."""
        self.path = path
        self.lock = threading.RLock()

    def connect(self, mode: str) -> sqlite3.Connection:
        """Return a new connection in one of SQLite's modes: ``ro``, ``rw``, ``rwc`` (made if missing) or ``memory``."""
        if mode == "rwc":
            with suppress(OSError):  # the file exists, or SQLite reports the error below
                create_file(self.path)  # SQLite gives this file's permissions to the files beside it
        db = sqlite3.connect(
            f"file:{quote(os.fsencode(self.path.absolute()))}?mode={mode}",
            uri=True,
            timeout=self.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        db.execute("PRAGMA foreign_keys = ON")
        return db

    def stored_format(self) -> int:
        """Return the format of the file's tables, 0 for an empty file; raise StoreError for another program's tables."""
        # The order matters: between the two queries, another process may make the tables and set their format.
        tables = self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = int(self.db.execute("PRAGMA user_version").fetchone()[0])
        if version == 0 and tables:
            raise StoreError(f"{self.path} is not {self.kind} of this library. Use another store directory.")
        return version

    def check_format(self) -> None:
        """Raise StoreMismatchError if the file's tables have another format."""
        version = self.stored_format()
        if version != self.format:
            raise StoreMismatchError(
                f"{self.name.capitalize()} {self.path} has format {version}; this version reads format {self.format}. "
                "Use another store directory, or the version that made it."
            )

    def make_tables(self) -> bool:
        """Make the tables if the file is empty, within a transaction; return whether the file was empty."""
        if self.stored_format() != 0:
            return False
        for statement in self.schema.split(";\n"):
            self.db.execute(statement)
        self.db.execute(f"PRAGMA user_version = {self.format}")
        return True

    @property
    def generation(self) -> Hashable:
        """Return a value that differs after every change of the contents, by this process or by others."""
        with self.access():
            return self.db.execute("PRAGMA data_version").fetchone()[0], self.db.total_changes

    @contextmanager
    def access(self) -> Iterator[None]:
        """Hold the lock, and turn SQLite's errors into :class:`StoreError`."""
        with self.lock, self.explained("use"):
            yield

    @contextmanager
    def transaction(self, write: bool = True) -> Iterator[None]:
        """Run the block on one consistent state; with ``write``, commit all changes or, after an exception, none."""
        with self.access():
            self.db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # the first error is the error to raise
                    self.db.execute("ROLLBACK")
                raise

    def find_chunks(self, which: str, *parameters: object) -> list[Chunk]:
        """Return the chunks that satisfy an SQL condition on the table of chunks."""
        raise NotImplementedError

    def chunk_at(self, row: int) -> Chunk | None:
        return next(iter(self.find_chunks("id = ?", row)), None)

    def named(self, chunk_id: str) -> Chunk | None:
        return next(iter(self.find_chunks("name = ?", chunk_id)), None)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        return self.find_chunks("name > ? ORDER BY name LIMIT ?", chunk_id, most)

    def rows(self, query: str, *parameters: object) -> list[Any]:
        """Return all rows of a query."""
        with self.access():
            return self.db.execute(query, parameters).fetchall()

    def read_signatures(self, query: str, *parameters: object) -> tuple[Indices, Signatures]:
        """Return the rows and signatures that a query finds, as arrays."""
        rows: list[int] = []
        stored: list[bytes] = []
        with self.access(), self.decoding():
            cursor = self.db.execute(query, parameters)
            while page := cursor.fetchmany(_ROWS_AT_ONCE):
                rows += (row for row, _ in page)
                stored.append(b"".join(signature for _, signature in page))
            return np.array(rows, np.int64), np.frombuffer(b"".join(stored), SIGNATURE)

    @contextmanager
    def explained(self, action: str) -> Iterator[None]:
        """Turn the errors of SQLite and the system into :class:`StoreError`; ``action`` is the verb of the message."""
        try:
            yield
        except sqlite3.ProgrammingError:  # a mistake in the calling code, such as use after close
            raise
        except sqlite3.Error as error:
            raise self._explain(error, action) from error
        except UnicodeDecodeError as error:  # SQLite's own messages quote the damaged contents
            raise self.damaged(str(error)) from error
        except OSError as error:
            raise StoreError(f"Cannot {action} {self.name} {self.path}: {error.strerror or error}.") from error

    def _explain(self, error: sqlite3.Error, action: str) -> StoreError:
        extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        code = extended if extended == sqlite3.SQLITE_READONLY_DBMOVED else extended & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            return self.damaged(str(error))
        what = {
            sqlite3.SQLITE_BUSY: (
                f"another process has kept it locked for {self.busy_timeout_s:.0f} s; stop it or try again"
            ),
            sqlite3.SQLITE_FULL: "the disk is full; free some space (nothing that was stored before is lost)",
            sqlite3.SQLITE_READONLY: "no write permission; only reading works",
            sqlite3.SQLITE_READONLY_DBMOVED: (
                "it was moved, deleted or replaced while it was open; restart what has it open, which sees the former "
                "one alone"
            ),
            sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check the permissions of the file and its directory",
            sqlite3.SQLITE_IOERR: f"the disk reports an error ({error}); check it and the space left",
        }.get(code, str(error))
        return StoreError(f"Cannot {action} {self.name} {self.path}: {what}.")

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Turn the errors that stored values of another type, or invalid JSON, raise into the error for damage."""
        try:
            yield
        except (AttributeError, TypeError, ValueError) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, why: str) -> StoreError:
        """Return the error for damaged contents."""
        return StoreError(f"{self.name.capitalize()} {self.path} is damaged ({why}). {self.start_over}")

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self.db.close()


def checksum(*parts: bytes) -> bytes:
    """Return a checksum of the parts in a row; SQLite itself stores no checksums."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def chunk_row(chunk: Chunk) -> tuple[str, str, bytes, str, bytes]:
    """Return a chunk as stored: id, text, little-endian 32-bit token ids, metadata as JSON, and its text's signature."""
    signature = signatures_of([chunk.text]).tobytes()
    token_ids = np.asarray(chunk.token_ids, dtype="<i4").tobytes()
    return chunk.id, chunk.text, token_ids, json.dumps(dict(chunk.metadata), default=str), signature


def row_chunk(name: str, text: str, token_ids: bytes, metadata: str | None) -> Chunk:
    """Return the chunk that :func:`chunk_row` stored; use within :meth:`SQLiteFile.decoding`."""
    return Chunk(name, text, pack_ids(np.frombuffer(token_ids, "<i4").tolist()), json.loads(metadata or "{}"))
