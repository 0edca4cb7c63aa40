"""The SQLite file of an index: the single source of truth about documents, chunks and vectors."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import xxhash
from filelock import FileLock

from cacheblend_rag.errors import StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.tokens import pack_ids
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Vectors
from cacheblend_rag.retrieval.manifest import IndexManifest

FILE_NAME = "index.sqlite3"
FORMAT = 1
BUSY_TIMEOUT_S = 60.0

_SCHEMA = f"""
CREATE TABLE manifest (json TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE documents (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, digest TEXT NOT NULL);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, text TEXT NOT NULL, token_ids BLOB NOT NULL, checksum BLOB NOT NULL
);
CREATE TABLE occurrences (
    document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    chunk INTEGER NOT NULL REFERENCES chunks,
    metadata TEXT NOT NULL,
    PRIMARY KEY (document, ordinal)
) WITHOUT ROWID;
CREATE INDEX occurrences_of_chunk ON occurrences (chunk);
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, so an id says whether a vector is new
    chunk INTEGER NOT NULL REFERENCES chunks ON DELETE CASCADE,
    vector BLOB NOT NULL,
    checksum BLOB NOT NULL
);
CREATE INDEX vectors_of_chunk ON vectors (chunk);
PRAGMA user_version = {FORMAT};
"""


class IndexDatabase:
    """A connection to the file, for one process. Hold :attr:`lock` around everything; see the module for what is in it.

    Attributes:
        path: The file.
        lock: Serialises the threads of this process.
        db: The connection; autocommit, transactions by :meth:`transaction`.
    """

    def __init__(self, directory: Path, manifest: IndexManifest | None):
        """Open the file in ``directory``; create it for ``manifest`` where there is none.

        Raises:
            StoreError: There is none and no manifest is given, or it cannot be opened.
            StoreMismatchError: It was made for something else.
        """
        self.path = directory / FILE_NAME
        self.lock = threading.RLock()
        self._snapshot: tuple[int, int] | None = None  # of a file read without locks
        with self._explained("open"):
            if manifest is not None and not self.path.exists():
                directory.mkdir(parents=True, exist_ok=True)
            self.db = self._connect(create=manifest is not None)
            try:
                self._prepare(manifest)
            except BaseException:
                self.db.close()
                raise

    def _connect(self, create: bool) -> sqlite3.Connection:
        directory = self.path.parent
        if not self.path.exists() and not create:
            raise self._absent()
        target = self.path if self.path.exists() else directory
        if os.access(target, os.W_OK) and os.access(directory, os.W_OK):
            return self._open("rwc" if create else "rw")
        if not self.path.exists():
            raise StoreError(f"Cannot make an index in {directory}: no permission. Use another store directory.")
        wal = self.path.with_name(FILE_NAME + "-wal")
        before = self._stamp()
        try:
            db = self._open("ro")
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # Without permission to write, SQLite reads a file with a log only beside a process that has it open.
            if wal.exists() and wal.stat().st_size:
                raise StoreError(
                    f"The index {self.path} was not closed properly and cannot be read without write permission. "
                    "Open it once as a user who has it."
                ) from None
            self._snapshot = before
            return self._open("ro&immutable=1")
        self._snapshot = None
        return db

    def _open(self, mode: str) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        db.execute("PRAGMA foreign_keys = ON")
        return db

    def _prepare(self, manifest: IndexManifest | None) -> None:
        version = self._format()
        if version == 0 and manifest is not None:
            with FileLock(str(self.path) + ".lock", timeout=BUSY_TIMEOUT_S):
                if self.db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    self.db.execute("PRAGMA journal_mode = WAL")
                with self.transaction():
                    version = self._format()
                    if version == 0:
                        for statement in _SCHEMA.split(";\n"):
                            self.db.execute(statement)
                        self.put_manifest(replace(manifest, embedding=manifest.embedding or DEFAULT_EMBEDDING))
                        version = FORMAT
        if version == 0:
            raise self._absent()
        if version != FORMAT:
            raise StoreMismatchError(
                f"The index {self.path} has format {version}; this version reads format {FORMAT}. "
                "Index into another directory, or use the version that made it."
            )
        if manifest is not None:
            self.manifest().check(manifest, self.path.parent)

    def _format(self) -> int:
        version = int(self.db.execute("PRAGMA user_version").fetchone()[0])
        if version == 0 and self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise StoreError(f"{self.path} is not an index of this library. Use another store directory.")
        return version

    def _absent(self) -> StoreError:
        return StoreError(
            f"There is no index in {self.path.parent}. Make one with: cacheblend index FILES --store DIRECTORY"
        )

    def manifest(self) -> IndexManifest:
        """Return what the index was made with."""
        for text, stored in self.rows("SELECT json, checksum FROM manifest"):
            if isinstance(text, str) and checksum(text.encode()) == stored:
                return IndexManifest.from_json(text)
        raise self.damaged("its manifest fails its checksum")

    def put_manifest(self, manifest: IndexManifest) -> None:
        """Write what the index was made with."""
        text = manifest.to_json()
        self.db.execute("DELETE FROM manifest")
        self.db.execute("INSERT INTO manifest VALUES (?, ?)", (text, checksum(text.encode())))

    def generation(self) -> Hashable:
        """Return a value that is another one after every change of the contents, by this process or by others."""
        with self.access():
            return self._snapshot or (self.db.execute("PRAGMA data_version").fetchone()[0], self.db.total_changes)

    def _refresh(self) -> None:
        """Reopen a file that is read without locks and has changed."""
        if self._snapshot is not None and not self.db.in_transaction and self._snapshot != self._stamp():
            self.db.close()
            self.db = self._connect(create=False)

    def _stamp(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size

    @contextmanager
    def access(self) -> Iterator[None]:
        """Hold the lock and turn SQLite's errors into ours."""
        with self.lock, self._explained("use"):
            self._refresh()
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

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # a mistake in the calling code, such as use after close
            raise
        except sqlite3.Error as error:
            raise self._explain(error, action) from error
        except OSError as error:
            raise StoreError(f"Cannot {action} the index {self.path}: {error.strerror or error}.") from error

    def _explain(self, error: sqlite3.Error, action: str) -> StoreError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            return self.damaged(str(error))
        what = {
            sqlite3.SQLITE_BUSY: f"another process has kept it locked for {BUSY_TIMEOUT_S:.0f} s; stop it or try again",
            sqlite3.SQLITE_FULL: "the disk is full; free some space (nothing that was indexed is lost)",
            sqlite3.SQLITE_READONLY: "no write permission; searching works, changing does not",
            sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check the permissions of the file and its directory",
            sqlite3.SQLITE_IOERR: f"the disk reports an error ({error}); check it and the space left",
        }.get(code, str(error))
        return StoreError(f"Cannot {action} the index {self.path}: {what}.")

    def damaged(self, why: str) -> StoreError:
        """Return the error for contents that cannot be right."""
        return StoreError(
            f"The index {self.path} is damaged ({why}). Delete {FILE_NAME}* in that directory and index the documents again; "
            "the stored KV is kept and reused."
        )

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self.db.close()

    def rows(self, query: str, *parameters: object) -> list[Any]:
        """Return all rows of a query."""
        with self.access():
            return self.db.execute(query, parameters).fetchall()

    def embedded(self, names: Iterable[str]) -> set[str]:
        """Return which of these chunks are stored with their vectors."""
        query = (
            "SELECT c.name FROM json_each(?) j JOIN chunks c ON c.name = j.value "
            "WHERE EXISTS (SELECT 1 FROM vectors v WHERE v.chunk = c.id)"
        )
        return {name for (name,) in self.rows(query, json.dumps(list(names)))}

    def clear_document(self, path: str) -> list[int]:
        """Empty a document; return the rows of the chunks it held, in order."""
        query = "SELECT o.chunk FROM occurrences o JOIN documents d ON d.id = o.document WHERE d.path = ? ORDER BY o.ordinal"
        held = [chunk for (chunk,) in self.rows(query, path)]
        self.db.execute("DELETE FROM occurrences WHERE document = (SELECT id FROM documents WHERE path = ?)", (path,))
        return held

    def put_document(self, path: str, digest: str) -> int:
        """Enter a document or its new digest; return its row."""
        query = "INSERT INTO documents (path, digest) VALUES (?, ?) ON CONFLICT (path) DO UPDATE SET digest = excluded.digest"
        self.db.execute(query, (path, digest))
        return int(self.rows("SELECT id FROM documents WHERE path = ?", path)[0][0])

    def put_occurrence(self, document: int, ordinal: int, chunk: Chunk, vectors: Vectors | None) -> None:
        """Enter a chunk at its place in a document. ``vectors`` (``[windows, dimension]``) are kept if it has none yet."""
        query = "INSERT INTO chunks (name, text, token_ids, checksum) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING"
        self.db.execute(query, chunk_row(chunk))
        row = self.rows("SELECT id FROM chunks WHERE name = ?", chunk.id)[0][0]
        if vectors is not None and not self.rows("SELECT 1 FROM vectors WHERE chunk = ? LIMIT 1", row):
            self.put_vectors(row, vectors)
        metadata = json.dumps(dict(chunk.metadata), default=str)
        self.db.execute("INSERT INTO occurrences VALUES (?, ?, ?, ?)", (document, ordinal, row, metadata))

    def put_vectors(self, chunk: int, vectors: Vectors) -> None:
        """Enter the vectors of a chunk's windows."""
        query = "INSERT INTO vectors (chunk, vector, checksum) VALUES (?, ?, ?)"
        self.db.executemany(query, ((chunk, *vector_row(vector)) for vector in vectors))

    def remove_orphans(self, chunks: Iterable[int]) -> list[str]:
        """Remove those of these chunks that no document holds; return their ids."""
        query = (
            "DELETE FROM chunks AS c WHERE c.id = ? AND NOT EXISTS (SELECT 1 FROM occurrences WHERE chunk = c.id) "
            "RETURNING name"
        )
        return [name for chunk in chunks for (name,) in self.rows(query, chunk)]


CHUNK_COLUMNS = "c.name, c.text, c.token_ids, c.checksum"


def chunk_row(chunk: Chunk) -> tuple[str, str, bytes, bytes]:
    """Return a chunk as stored: little-endian 32-bit token ids, and a checksum."""
    ids = np.asarray(chunk.token_ids, dtype="<i4").tobytes()
    return chunk.id, chunk.text, ids, checksum(chunk.id.encode(), chunk.text.encode(), ids)


def read_chunk(database: IndexDatabase, row: tuple[Any, ...]) -> Chunk:
    """Return the chunk of ``CHUNK_COLUMNS`` and a metadata column.

    Raises:
        StoreError: It does not match its checksum.
    """
    name, text, ids, stored, metadata = row
    try:
        if checksum(name.encode(), text.encode(), ids) == stored:
            return Chunk(name, text, pack_ids(np.frombuffer(ids, "<i4").tolist()), json.loads(metadata or "{}"))
    except (AttributeError, TypeError, ValueError) as error:  # a value of another type, or no JSON
        raise database.damaged(str(error)) from error
    raise database.damaged(f"chunk {name} fails its checksum")


def vector_row(vector: Vectors) -> tuple[bytes, bytes]:
    """Return a vector as stored."""
    data = vector.astype("<f4").tobytes()
    return data, checksum(data)


def checksum(*parts: bytes) -> bytes:
    """Return a checksum of the parts in a row; SQLite keeps none."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()
