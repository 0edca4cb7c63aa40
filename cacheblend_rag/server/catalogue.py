"""The chunks a server knows: those of the index in its store directory, and those registered over HTTP."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from cacheblend_rag.errors import StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.tokens import pack_ids
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.kv import ModelFingerprint

FILE_NAME = "registered.sqlite"
Origin = Literal["registered", "index"]

_log = logging.getLogger("vllm.cacheblend")  # below vLLM's logger, whose handlers and level its flags set
_FORMAT = 1
_BUSY_TIMEOUT_S = 30.0
_REFRESH_S = 0.5
_MAX_NOTED = 4096
_SCHEMA = (
    "CREATE TABLE chunks (name TEXT NOT NULL, model TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, "
    "metadata TEXT NOT NULL, PRIMARY KEY (model, name)) WITHOUT ROWID"
)


class ChunkCatalogue:
    """Keeps a registry in step with a store directory. Thread-safe; several servers may share the directory.

    Chunks registered over HTTP are kept in a SQLite file with a rollback journal, which works on a network file system with
    locks, as WAL does not. Chunks of the index that ``cacheblend index`` made there are known too, and stay the index's:
    they are not removed here.

    Attributes:
        notes: What the operator should know, such as an index of another model.
    """

    def __init__(self, directory: Path | None, registry: ChunkRegistry, fingerprint: ModelFingerprint):
        """Open the files in ``directory`` (None: keep nothing) and register what they hold for this model.

        Raises:
            StoreError: A file there cannot be used.
        """
        self.notes: list[str] = []
        self._registry, self._fingerprint = registry, fingerprint
        self._lock = threading.Lock()
        self._checked = 0.0
        self._own: dict[str, Chunk] = {}
        self._indexed: dict[str, Chunk] = {}
        self._noted: dict[str, Chunk] = {}
        self._path = None if directory is None else directory / FILE_NAME
        self._db = self._open()
        self._version: object = None
        self._directory = directory
        self._index: ChunkIndex | None = None
        self._generation: object = None
        self._open_index()
        self.refresh(force=True)

    def _open(self) -> sqlite3.Connection:
        name = ":memory:" if self._path is None else str(self._path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            db = sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            db.execute("BEGIN IMMEDIATE")
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            db.execute("COMMIT")
        if version not in (0, _FORMAT):
            raise StoreMismatchError(f"{name} has format {version}; this version reads {_FORMAT}. Use another --store.")
        return db

    def _open_index(self) -> None:
        if self._index is not None or self._directory is None or not ChunkIndex.exists(self._directory):
            return
        index = ChunkIndex.open(self._directory)
        made_for = index.manifest.model
        if made_for == self._fingerprint:
            self._index = index
            return
        index.close()
        note = (
            f"The index in {self._directory} is of another model or dtype ({made_for.name}, {made_for.digest[:8]}), not of "
            f"{self._fingerprint.name} ({self._fingerprint.digest[:8]}): its chunks are not known to this server."
        )
        if note not in self.notes:
            self.notes.append(note)

    def refresh(self, force: bool = False) -> None:
        """Take up what other servers and ``cacheblend index`` have changed.

        Args:
            force: Look now; otherwise twice a second at most, and files that cannot be read for now are left for later: what
                is known already can still be served.

        Raises:
            StoreError: The files cannot be read, and ``force`` is set.
        """
        with self._lock:
            now = time.monotonic()
            if not force and now - self._checked < _REFRESH_S:
                return
            self._checked = now
            try:
                self._take_up()
            except StoreError as error:
                if force:
                    raise
                _log.warning("What other processes have registered or indexed is not known here: %s", error)

    def _take_up(self) -> None:
        with self._explained():
            version = self._db.execute("PRAGMA data_version").fetchone()[0]
            if version != self._version:
                self._own = self._replace(self._own, self._read(), self._indexed)
                self._version = version
        if self._index is None:
            self._open_index()
        if self._index is not None and (generation := self._index.generation) != self._generation:
            self._indexed = self._replace(self._indexed, {c.id: c for c in self._index.chunks()}, self._own)
            self._generation = generation

    def _replace(self, old: dict[str, Chunk], new: dict[str, Chunk], others: dict[str, Chunk]) -> dict[str, Chunk]:
        self._registry.remove(name for name in old if name not in new and name not in others)
        self._registry.add(chunk for name, chunk in new.items() if name not in old)
        return new

    def _read(self) -> dict[str, Chunk]:
        query = "SELECT name, text, token_ids, metadata FROM chunks WHERE model = ? ORDER BY name"
        rows = self._db.execute(query, (self._fingerprint.digest,))
        return {
            name: Chunk(name, text, pack_ids(np.frombuffer(ids, "<i4").tolist()), json.loads(metadata))
            for name, text, ids, metadata in rows
        }

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Keep and register chunks.

        Raises:
            StoreError: They cannot be written; none is kept.
        """
        rows = [
            (
                chunk.id,
                self._fingerprint.digest,
                chunk.text,
                np.asarray(chunk.token_ids, "<i4").tobytes(),
                json.dumps(dict(chunk.metadata), default=str),
            )
            for chunk in chunks
        ]
        with self._lock, self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO chunks (name, model, text, token_ids, metadata) VALUES (?, ?, ?, ?, ?)", rows
            )
        with self._lock:
            self._own.update((chunk.id, chunk) for chunk in chunks)
            self._registry.add(chunks)

    def note(self, chunk: Chunk) -> None:
        """Register a chunk that a prompt has brought, so that its KV can be written back; not kept over a restart.

        Anybody's prompt may bring any number of them: the oldest are forgotten.
        """
        with self._lock:
            if chunk.id in self._registry:
                return
            self._noted[chunk.id] = chunk
            self._registry.add([chunk])
            if len(self._noted) > _MAX_NOTED:
                oldest = next(iter(self._noted))
                del self._noted[oldest]
                self._registry.remove(() if oldest in self._own or oldest in self._indexed else (oldest,))

    def remove(self, chunk_ids: Sequence[str]) -> None:
        """Forget registered chunks; those of the index stay.

        Raises:
            StoreError: The file cannot be written.
        """
        with self._lock, self._transaction():
            rows = [(self._fingerprint.digest, name) for name in chunk_ids]
            self._db.executemany("DELETE FROM chunks WHERE model = ? AND name = ?", rows)
        with self._lock:
            for name in chunk_ids:
                self._own.pop(name, None)
                self._noted.pop(name, None)
            self._registry.remove(name for name in chunk_ids if name not in self._indexed)

    def origin(self, chunk_id: str) -> Origin | None:
        """Say where a chunk is kept; None for one that only this process knows (a prompt brought it) or nobody."""
        if chunk_id in self._indexed:
            return "index"
        return "registered" if chunk_id in self._own else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # a mistake in the calling code, such as use after close
            raise
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"The registered chunks in {self._path} cannot be read or written: {error}. Check permissions and room on the "
                "disk; if the file is damaged, delete it and register the chunks again (their stored KV is kept)."
            ) from error

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._db.close()
            if self._index is not None:
                self._index.close()
