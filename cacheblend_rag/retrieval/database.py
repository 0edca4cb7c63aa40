"""Stores an index's documents, chunks, vectors and configuration in tables, their single source of truth."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from cacheblend_rag.errors import InputError, StoreError, StoreMismatchError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.matching import Indices, Signatures
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS
from cacheblend_rag.retrieval.documents import INDEX_FILE
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, VECTOR_TABLES, Vectors, VectorTable
from cacheblend_rag.retrieval.sqlite import SQLiteFile, checksum, chunk_row, row_chunk
from cacheblend_rag.store.files import file_mode, make_root
from cacheblend_rag.store.identity import ModelFingerprint, WrittenBy

_SCHEMA = """
CREATE TABLE config (json TEXT NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE documents (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, digest TEXT NOT NULL);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, text TEXT NOT NULL, token_ids BLOB NOT NULL, checksum BLOB NOT NULL,
    signature BLOB NOT NULL  -- of the text; not in the checksum, since what it finds is compared
);
CREATE INDEX signatures ON chunks (id, signature);
CREATE TABLE rows (
    last INTEGER NOT NULL  -- id of a chunk; none is used twice, so an id says whether a chunk is new
);
INSERT INTO rows VALUES (0);
CREATE TABLE occurrences (
    document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    chunk INTEGER NOT NULL REFERENCES chunks,
    metadata TEXT NOT NULL,
    PRIMARY KEY (document, ordinal)
) WITHOUT ROWID;
CREATE INDEX occurrences_of_chunk ON occurrences (chunk);
"""

_CHUNK = "c.name, c.text, c.token_ids, c.checksum"
_METADATA_OF_CHUNK = (
    "(SELECT o.metadata FROM occurrences o JOIN documents d ON d.id = o.document WHERE o.chunk = c.id "
    "ORDER BY d.path, o.ordinal LIMIT 1)"
)


@dataclass(frozen=True)
class IndexConfig:
    """Holds the settings with which an index was made; opening the index with other settings is refused.

    Attributes:
        model: LLM whose tokens make up the chunks.
        header_ids: Ids of the tokens in front of every chunk when the chunk's KV is computed.
        chunk_tokens: Maximum number of tokens in a chunk.
        overlap: Number of tokens that a chunk repeats from the previous chunk.
        embedding: Name or path of the sentence-transformers model; None stands for the index's own model, or the
            default for a new index.
        writer: KV writer that has written the KV of all chunks; None for the model itself. The writer may change.
        former: Earlier KV writers, whose KV of the same chunks may also be stored.
    """

    model: ModelFingerprint
    header_ids: tuple[int, ...] = ()
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    overlap: int = 0
    embedding: str | None = None
    writer: WrittenBy | None = None
    former: tuple[WrittenBy, ...] = ()

    @property
    def writers(self) -> tuple[WrittenBy, ...]:
        """Return all KV writers, the present writer first."""
        return self.former if self.writer is None else (self.writer, *self.former)

    def written_by(self, writer: WrittenBy) -> IndexConfig:
        """Return a copy with another KV writer; the earlier writers become former writers."""
        return replace(self, writer=writer, former=tuple(each for each in self.writers if each != writer))

    @classmethod
    def from_json(cls, text: str) -> IndexConfig:
        """Return the configuration stored as JSON in ``text``."""
        fields = json.loads(text)
        model, header = ModelFingerprint(**fields.pop("model")), tuple(fields.pop("header_ids"))
        writer, former = fields.pop("writer"), fields.pop("former", ())  # older indexes have no "former"
        fields |= {"writer": writer and WrittenBy(**writer), "former": tuple(WrittenBy(**each) for each in former)}
        return cls(model=model, header_ids=header, **fields)

    def unused_by(self, writer: WrittenBy | None) -> str | None:
        """Return advice if an engine with ``writer`` does not use the KV of this index's writer, else None."""
        if self.writer is None or writer == self.writer:
            return None
        anew = "chunks behind a prompt's first are computed anew"
        if writer is not None and writer.directory == self.writer.directory:
            return f"The KV writer in {writer.directory} has changed since it wrote these documents: {anew}. Index them again."
        instead, other = "the model's own is, which takes more recomputation", ""
        if writer is not None:
            instead, other = anew, f", or index them again with the one in {writer.directory}"
        return (
            f"The KV of these documents was written by the KV writer in {self.writer.directory}. Without it that is not used: "
            f"{instead}. Give --writer {self.writer.directory}{other}."
        )

    def check(self, wanted: IndexConfig, directory: Path) -> None:
        """Raise StoreMismatchError, naming both sides and a remedy, if the index does not have the settings ``wanted``."""
        wrong: list[str] = []
        if wanted.model != self.model and wanted.model.name == self.model.name:
            wrong.append(
                f"it was made for {self.model.name} with other weights, or in another dtype ({self.model.digest[:8]}, now "
                f"{wanted.model.digest[:8]}): use those"
            )
        elif wanted.model != self.model:
            wrong.append(
                f"it was made for the model {self.model.name} ({self.model.digest[:8]}), not for {wanted.model.name} "
                f"({wanted.model.digest[:8]}): use --model {self.model.name}"
            )
        elif wanted.header_ids != self.header_ids:
            wrong.append(
                f"its chunks stand behind another prompt header ({len(self.header_ids)} tokens, now "
                f"{len(wanted.header_ids)}): use the chat template and instruction it was made with"
            )
        if (self.chunk_tokens, self.overlap) != (wanted.chunk_tokens, wanted.overlap):
            wrong.append(
                f"it is cut into chunks of {self.chunk_tokens} tokens (overlap {self.overlap}), not {wanted.chunk_tokens} "
                f"(overlap {wanted.overlap}): use the same settings"
            )
        if wanted.embedding not in (None, self.embedding):
            wrong.append(
                f"its embedding model is {self.embedding}, not {wanted.embedding}: use that one, or rebuild the index"
            )
        if wrong:
            raise StoreMismatchError(
                f"The index in {directory} does not fit: {'; '.join(wrong)}. Or index into another directory."
            )


@dataclass(frozen=True)
class IndexedDocument:
    """Describes one document in an index: its path, content digest and number of chunks."""

    path: str
    digest: str
    chunks: int


class IndexDatabase(SQLiteFile):
    """Holds the tables of :class:`~cacheblend_rag.retrieval.index.ChunkIndex`; "row" is a chunk's number in its table.

    Methods that change the tables need a transaction around them. Like all SQLite files of the library, the file has a
    rollback journal, which works on a network file system with locks; WAL does not.
    """

    name = "the index"
    kind = "an index"
    start_over = (
        f"Delete {INDEX_FILE}* in that directory and index the documents again; the stored KV is kept and reused."
    )
    format = 2
    schema = _SCHEMA + VECTOR_TABLES

    def __init__(self, directory: Path, config: IndexConfig | None, own: Iterable[str] = ()):
        """Open the index in ``directory``; with ``config``, create a missing index, or check an existing index.

        An existing index keeps its ``own`` values of the settings with these names.

        Raises:
            StoreError: There is no index and no config is given, or the index cannot be opened.
            StoreMismatchError: The index was made with settings other than ``config``.
        """
        super().__init__(directory / INDEX_FILE)
        self.vectors = VectorTable(self)
        with self.explained("open"):
            if config is not None and not self.path.exists():
                make_root(directory)
            self.db = self._connect(create=config is not None)
            try:
                self._prepare(config, own)
            except BaseException:
                self.db.close()
                raise

    @staticmethod
    def exists(directory: Path | str) -> bool:
        """Return whether ``directory`` holds an index file that is not empty; an index that is being made is empty."""
        path = from_home(directory) / INDEX_FILE
        return path.is_file() and path.stat().st_size > 0

    def _connect(self, create: bool) -> sqlite3.Connection:
        directory = self.path.parent
        if not self.path.exists() and not create:
            raise self._absent()
        target = self.path if self.path.exists() else directory
        if os.access(target, os.W_OK) and os.access(directory, os.W_OK):
            return self.connect("rwc" if create else "rw")
        if not self.path.exists():
            raise StoreError(f"Cannot make an index in {directory}: no permission. Use another store directory.")
        db = self.connect("ro")
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            db.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise
            raise StoreError(
                f"The index {self.path} was not closed properly and cannot be read without write permission. "
                "Open it once as a user who has it."
            ) from None
        return db

    def _prepare(self, config: IndexConfig | None, own: Iterable[str]) -> None:
        if config is not None and self.stored_format() == 0:
            lock = f"{self.path}.lock"
            with FileLock(lock, timeout=self.busy_timeout_s, mode=file_mode(self.path.parent)), self.transaction():
                if self.make_tables():
                    self.put_config(replace(config, embedding=config.embedding or DEFAULT_EMBEDDING))
        if self.stored_format() == 0:
            raise self._absent()
        self.check_format()
        # Keep uncommitted pages in memory: in the file, they would block readers until the commit.
        self.db.execute("PRAGMA cache_spill = OFF")
        if config is not None:
            made = self.config
            made.check(replace(config, **{name: getattr(made, name) for name in own}), self.path.parent)

    def _absent(self) -> StoreError:
        return StoreError(
            f"There is no index in {self.path.parent}. Make one with: cacheblend index FILES --store DIRECTORY"
        )

    @property
    def config(self) -> IndexConfig:
        """Return the settings with which the index was made."""
        for text, stored in self.rows("SELECT json, checksum FROM config"):
            if isinstance(text, str) and checksum(text.encode()) == stored:
                return IndexConfig.from_json(text)
        raise self.damaged("its configuration fails its checksum")

    def put_config(self, config: IndexConfig) -> None:
        """Write the settings of the index."""
        text = json.dumps(asdict(config))
        self.db.execute("DELETE FROM config")
        self.db.execute("INSERT INTO config (json, checksum) VALUES (?, ?)", (text, checksum(text.encode())))

    def documents(self) -> list[IndexedDocument]:
        """List the documents in path order."""
        query = (
            "SELECT d.path, d.digest, count(o.ordinal) FROM documents d LEFT JOIN occurrences o ON o.document = d.id "
            "GROUP BY d.id ORDER BY d.path"
        )
        return [IndexedDocument(*row) for row in self.rows(query)]

    def digest_of(self, path: str) -> str | None:
        """Return the digest with which a document was indexed, or None if the document is not in the index."""
        rows = self.rows("SELECT digest FROM documents WHERE path = ?", path)
        return rows[0][0] if rows else None

    def replace_document(
        self, path: str, digest: str, chunks: Sequence[Chunk], vectors: Mapping[str, Vectors]
    ) -> list[Chunk]:
        """Insert a document in place of the document at its path; return the chunks that no document holds any more.

        ``vectors`` (``[windows, dimension]`` by chunk id) are stored for chunks that have no vectors yet.
        """
        before = self._clear_document(path)
        query = "INSERT INTO documents (path, digest) VALUES (?, ?) ON CONFLICT (path) DO UPDATE SET digest = excluded.digest"
        self.db.execute(query, (path, digest))
        document = self.rows("SELECT id FROM documents WHERE path = ?", path)[0][0]
        for ordinal, chunk in enumerate(chunks):
            self._put_occurrence(document, ordinal, chunk, vectors.get(chunk.id))
        return self._remove_orphans(before)

    def delete(self, path: str) -> list[Chunk]:
        """Remove a document in one transaction; return, without metadata, the chunks that no document holds any more.

        Raises:
            InputError: The document is not in the index.
            StoreError: The index cannot be written.
        """
        with self.transaction():
            if self.digest_of(path) is None:
                raise InputError(f"{path} is not in the index {self.path.parent}. `documents()` lists what is.")
            before = self._clear_document(path)
            self.db.execute("DELETE FROM documents WHERE path = ?", (path,))
            return self._remove_orphans(before)

    def _clear_document(self, path: str) -> list[int]:
        """Remove all chunks from a document; return the rows of the removed chunks, in order."""
        query = "SELECT o.chunk FROM occurrences o JOIN documents d ON d.id = o.document WHERE d.path = ? ORDER BY o.ordinal"
        held = [row for (row,) in self.rows(query, path)]
        self.db.execute("DELETE FROM occurrences WHERE document = (SELECT id FROM documents WHERE path = ?)", (path,))
        return held

    def _put_occurrence(self, document: int, ordinal: int, chunk: Chunk, vectors: Vectors | None) -> None:
        name, text, token_ids, metadata, signature = chunk_row(chunk)
        known = self.rows("SELECT id FROM chunks WHERE name = ?", name)
        row = known[0][0] if known else self.rows("UPDATE rows SET last = last + 1 RETURNING last")[0][0]
        if not known:
            query = "INSERT INTO chunks (id, name, text, token_ids, checksum, signature) VALUES (?, ?, ?, ?, ?, ?)"
            stored = _chunk_checksum(name, text, token_ids)
            self.db.execute(query, (row, name, text, token_ids, stored, signature))
        if vectors is not None and not self.rows("SELECT 1 FROM vectors WHERE chunk = ? LIMIT 1", row):
            self.vectors.put(row, vectors)
        query = "INSERT INTO occurrences (document, ordinal, chunk, metadata) VALUES (?, ?, ?, ?)"
        self.db.execute(query, (document, ordinal, row, metadata))

    def _remove_orphans(self, rows: Iterable[int]) -> list[Chunk]:
        """Remove the chunks in ``rows`` that no document holds; return the removed chunks, without metadata."""
        query = (
            "DELETE FROM chunks AS c WHERE c.id = ? AND NOT EXISTS (SELECT 1 FROM occurrences WHERE chunk = c.id) "
            "RETURNING name, text, token_ids"
        )
        with self.decoding():
            gone = (values for row in rows for values in self.rows(query, row))
            return [row_chunk(name, text, token_ids, None) for name, text, token_ids in gone]

    def chunks_after(self, row: int, count: int) -> list[tuple[int, Chunk]]:
        """Return row and chunk of the first ``count`` chunks after a row, with the metadata of their first places."""
        query = f"SELECT c.id, {_CHUNK}, {_METADATA_OF_CHUNK} FROM chunks c WHERE c.id > ? ORDER BY c.id LIMIT ?"
        return [(found, self._chunk(values)) for found, *values in self.rows(query, row, count)]

    def find_chunks(self, which: str, *parameters: object) -> list[Chunk]:
        """Return the chunks that satisfy an SQL condition, each with the metadata of its first place."""
        query = f"SELECT {_CHUNK}, {_METADATA_OF_CHUNK} FROM chunks c WHERE {which}"
        return [self._chunk(values) for values in self.rows(query, *parameters)]

    def signatures_after(self, row: int) -> tuple[Indices, Signatures]:
        """Return the rows and signatures of all chunks after a row."""
        # Only the SQL index is read: the table's rows also hold the texts.
        query = "SELECT id, signature FROM chunks INDEXED BY signatures WHERE id > ? ORDER BY id"
        return self.read_signatures(query, row)

    def known(self, names: Iterable[str]) -> set[str]:
        """Return which of the given chunk ids are in the index."""
        # CROSS JOIN reads the names first; otherwise SQLite may scan all chunks.
        query = "SELECT c.name FROM json_each(?) j CROSS JOIN chunks c ON c.name = j.value"
        return {name for (name,) in self.rows(query, json.dumps(list(names)))}

    def count(self) -> int:
        """Return the number of distinct chunks."""
        return int(self.rows("SELECT count(*) FROM chunks")[0][0])

    def first_place(self, row: int) -> tuple[str, int, Chunk]:
        """Return the first place of a chunk by path: the document's path, the ordinal there, and the chunk."""
        query = (
            f"SELECT d.path, o.ordinal, {_CHUNK}, o.metadata FROM chunks c JOIN occurrences o ON o.chunk = c.id "
            "JOIN documents d ON d.id = o.document WHERE c.id = ? ORDER BY d.path, o.ordinal LIMIT 1"
        )
        for path, ordinal, *values in self.rows(query, row):
            return path, ordinal, self._chunk(values)
        raise self.damaged(f"a vector belongs to chunk {row}, which is in no document")

    def chunks_between(self, path: str, first: int, last: int) -> list[tuple[int, Chunk]]:
        """Return ordinal and chunk of a document's chunks from ordinal ``first`` to ``last``, both included."""
        query = (
            f"SELECT o.ordinal, {_CHUNK}, o.metadata FROM documents d JOIN occurrences o ON o.document = d.id "
            "JOIN chunks c ON c.id = o.chunk WHERE d.path = ? AND o.ordinal BETWEEN ? AND ? ORDER BY o.ordinal"
        )
        return [(ordinal, self._chunk(values)) for ordinal, *values in self.rows(query, path, first, last)]

    def _chunk(self, values: Sequence[Any]) -> Chunk:
        """Return the chunk of a row with the columns ``_CHUNK`` and a metadata column, if its checksum is right."""
        name, text, token_ids, stored, metadata = values
        with self.decoding():
            if _chunk_checksum(name, text, token_ids) == stored:
                return row_chunk(name, text, token_ids, metadata)
        raise self.damaged(f"chunk {name} fails its checksum")


def _chunk_checksum(name: str, text: str, token_ids: bytes) -> bytes:
    return checksum(name.encode(), text.encode(), token_ids)
