"""Holds what the library's SQLite files share: opening, transactions, errors a user can act on, a chunk's row.

The tables are in the modules of the two files: ``database.py`` (the index) and ``registered.py`` (the server's chunks).
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
from cacheblend_rag.store.closing import Closing
from cacheblend_rag.store.files import create_file

_ROWS_AT_ONCE = 1 << 16


class SQLiteFile(Closing):
    """A connection to one SQLite file, for one process; a subclass says which tables are in it, and opens it.

    Attributes:
        path: The file.
        lock: Serialises the threads of this process; :meth:`access` holds it.
        db: The connection; autocommit, transactions by :meth:`transaction`.
        name: What messages call the file, with "the".
        kind: The same with "a" or "an".
        start_over: What a user can do about a damaged file, as a sentence.
        format: The format of the tables, which the file holds as its ``user_version``.
        schema: The statements that make the tables, separated by ";" at a line's end.
        busy_timeout_s: How long to wait for another process that is writing.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    start_over: ClassVar[str]
    format: ClassVar[int]
    schema: ClassVar[str]
    busy_timeout_s: ClassVar[float] = 60.0
    db: sqlite3.Connection

    def __init__(self, path: Path):
        """Describe the file at ``path``; the subclass connects."""
        self.path = path
        self.lock = threading.RLock()

    def connect(self, mode: str) -> sqlite3.Connection:
        """Return a new connection in one of SQLite's modes: ``ro``, ``rw``, ``rwc`` (made if missing) or ``memory``."""
        if mode == "rwc":
            with suppress(OSError):  # it exists, or SQLite says why it cannot
                create_file(self.path)  # SQLite gives the files beside it the permissions that this one has
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
        """Return the format of the file's tables, 0 for an empty file.

        Raises:
            StoreError: It holds tables of somebody else.
        """
        # In this order: another process may make the tables, and their format with them, between the two.
        tables = self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = int(self.db.execute("PRAGMA user_version").fetchone()[0])
        if version == 0 and tables:
            raise StoreError(f"{self.path} is not {self.kind} of this library. Use another store directory.")
        return version

    def check_format(self) -> None:
        """Refuse a file whose tables are of another format.

        Raises:
            StoreMismatchError: They are.
        """
        version = self.stored_format()
        if version != self.format:
            raise StoreMismatchError(
                f"{self.name.capitalize()} {self.path} has format {version}; this version reads format {self.format}. "
                "Use another store directory, or the version that made it."
            )

    def make_tables(self) -> bool:
        """Make the tables in a file that is still empty, within a transaction; return whether it was."""
        if self.stored_format() != 0:
            return False
        for statement in self.schema.split(";\n"):
            self.db.execute(statement)
        self.db.execute(f"PRAGMA user_version = {self.format}")
        return True

    @property
    def generation(self) -> Hashable:
        """Return a value that is another one after every change of the contents, by this process or by others."""
        with self.access():
            return self.db.execute("PRAGMA data_version").fetchone()[0], self.db.total_changes

    @contextmanager
    def access(self) -> Iterator[None]:
        """Hold the lock and turn SQLite's errors into ours."""
        with self.lock, self.explained("use"):
            yield

    @contextmanager
    def transaction(self, write: bool = True) -> Iterator[None]:
        """Run the block on one consistent state; with ``write``, all of it is kept or, after an exception, nothing."""
        with self.access():
            self.db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # the first error is the one to tell
                    self.db.execute("ROLLBACK")
                raise

    def rows(self, query: str, *parameters: object) -> list[Any]:
        """Return all rows of a query."""
        with self.access():
            return self.db.execute(query, parameters).fetchall()

    def read_signatures(self, query: str, *parameters: object) -> tuple[Indices, Signatures]:
        """Return what a query for rows and signatures finds, as arrays."""
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
        """Turn what SQLite and the system raise in an attempt to ``action`` the file into :class:`StoreError`."""
        try:
            yield
        except sqlite3.ProgrammingError:  # a mistake in the calling code, such as use after close
            raise
        except sqlite3.Error as error:
            raise self._explain(error, action) from error
        except UnicodeDecodeError as error:  # in SQLite's own messages: they quote what is damaged
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
        """Turn what stored values of another type, or no JSON, raise in the block into the error for damage."""
        try:
            yield
        except (AttributeError, TypeError, ValueError) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, why: str) -> StoreError:
        """Return the error for contents that cannot be right."""
        return StoreError(f"{self.name.capitalize()} {self.path} is damaged ({why}). {self.start_over}")

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self.db.close()


def checksum(*parts: bytes) -> bytes:
    """Return a checksum of the parts in a row; SQLite keeps none."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def chunk_row(chunk: Chunk) -> tuple[str, str, bytes, str, bytes]:
    """Return a chunk as stored: id, text, little-endian 32-bit token ids, metadata as JSON, and its text's signature.

    That is :data:`~cacheblend_rag.prompts.matching.SIGNATURE`, little-endian.
    """
    signature = signatures_of([chunk.text]).tobytes()
    token_ids = np.asarray(chunk.token_ids, dtype="<i4").tobytes()
    return chunk.id, chunk.text, token_ids, json.dumps(dict(chunk.metadata), default=str), signature


def row_chunk(name: str, text: str, token_ids: bytes, metadata: str | None) -> Chunk:
    """Return the chunk that :func:`chunk_row` stored; use within :meth:`SQLiteFile.decoding`.

    Raises:
        AttributeError, TypeError, ValueError: The values are none that it has made.
    """
    return Chunk(name, text, pack_ids(np.frombuffer(token_ids, "<i4").tolist()), json.loads(metadata or "{}"))
