"""Documents, their chunks and their embeddings: retrieval with FAISS, kept in one SQLite file beside the KV store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.database import CHUNK_COLUMNS, FILE_NAME, IndexDatabase, read_chunk
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder, Vectors
from cacheblend_rag.retrieval.manifest import IndexManifest
from cacheblend_rag.retrieval.search import VectorSearch

__all__ = ["DEFAULT_EMBEDDING", "ChunkIndex", "Hit", "IndexManifest", "IndexStats", "IndexedDocument"]

_PAGE = 256
_METADATA_OF_CHUNK = (
    "(SELECT o.metadata FROM occurrences o JOIN documents d ON d.id = o.document WHERE o.chunk = c.id "
    "ORDER BY d.path, o.ordinal LIMIT 1)"
)


@dataclass(frozen=True)
class Hit:
    """A chunk found, in one of the places it stands.

    Attributes:
        chunk: The chunk, with the metadata of this place.
        score: Cosine similarity to the question; None for a neighbour, which was not compared with it.
        path: The document.
        ordinal: Position of the chunk in that document, from 0.
    """

    chunk: Chunk
    score: float | None
    path: str
    ordinal: int


@dataclass(frozen=True)
class IndexedDocument:
    """One document in the index: its path, content digest and number of chunks."""

    path: str
    digest: str
    chunks: int


@dataclass(frozen=True)
class IndexStats:
    """Contents of an index. ``tokens`` counts every distinct chunk once; ``nbytes`` is the size of the file."""

    documents: int
    chunks: int
    tokens: int
    nbytes: int
    embedding: str


class ChunkIndex:
    """Documents, chunks and vectors of one directory. Thread-safe; any number of processes may use it at once.

    The embedding model and FAISS are loaded by the first call that needs them. Vectors are searched in memory and follow
    what other processes change.

    Attributes:
        directory: Where the index is; the KV store's directory.
    """

    def __init__(self, database: IndexDatabase):
        """Use an open database; see :meth:`open`."""
        self.directory = database.path.parent
        self._database = database
        self._vectors = VectorSearch(database)
        self._embedder: Embedder | None = None
        self._loading = threading.Lock()

    @classmethod
    def open(cls, directory: Path | str, manifest: IndexManifest | None = None) -> Self:
        """Open the index in ``directory``; with a manifest, create it where there is none.

        Raises:
            StoreMismatchError: The index was made with another model or other settings.
            StoreError: There is none (and no manifest), it is damaged, or the directory cannot be used.
        """
        return cls(IndexDatabase(Path(directory).expanduser(), manifest))

    @staticmethod
    def exists(directory: Path | str) -> bool:
        """Say whether ``directory`` holds an index."""
        return (Path(directory).expanduser() / FILE_NAME).is_file()

    @property
    def manifest(self) -> IndexManifest:
        """What the index was made with."""
        return self._database.manifest()

    @property
    def generation(self) -> Hashable:
        """A value that is another one after every change, by this process or by others."""
        return self._database.generation()

    def add(self, document_path: str, digest: str, chunks: Iterable[Chunk]) -> list[str]:
        """Index a document in one transaction, in place of what was indexed under that path.

        Args:
            document_path: Identity of the document.
            digest: Content hash, for :meth:`digest_of`.
            chunks: Its chunks in order.

        Returns:
            Ids of the chunks that no document holds any more.

        Raises:
            StoreError: It cannot be written; the index is as it was.
            ModelError: The embedding model cannot be loaded.
        """
        ordered = list(chunks)
        distinct = {chunk.id: chunk for chunk in ordered}
        known: dict[str, Vectors] = {}
        while True:
            with self._database.transaction(write=False):
                name = self._embedding()
                present = self._database.embedded(distinct)
            self._embed(name, [c for c in distinct.values() if c.id not in present and c.id not in known], known)
            with self._database.transaction():
                if self._embedding() != name:
                    known.clear()  # another process has rebuilt the index with another model meanwhile
                elif distinct.keys() <= known.keys() | self._database.embedded(distinct):
                    return self._replace(document_path, digest, ordered, known)

    def _replace(self, path: str, digest: str, chunks: Sequence[Chunk], vectors: Mapping[str, Vectors]) -> list[str]:
        database = self._database
        before = database.clear_document(path)
        document = database.put_document(path, digest)
        for ordinal, chunk in enumerate(chunks):
            database.put_occurrence(document, ordinal, chunk, vectors.get(chunk.id))
        return database.remove_orphans(before)

    def delete(self, path: str) -> list[str]:
        """Remove a document; return the ids of the chunks that no document holds any more.

        Raises:
            InputError: It is not in the index.
            StoreError: The index cannot be written.
        """
        with self._database.transaction():
            if self.digest_of(path) is None:
                raise InputError(f"{path} is not in the index {self.directory}. `documents()` lists what is.")
            before = self._database.clear_document(path)
            self._database.db.execute("DELETE FROM documents WHERE path = ?", (path,))
            return self._database.remove_orphans(before)

    def documents(self) -> list[IndexedDocument]:
        """List the documents in path order."""
        query = (
            "SELECT d.path, d.digest, count(o.ordinal) FROM documents d LEFT JOIN occurrences o ON o.document = d.id "
            "GROUP BY d.id ORDER BY d.path"
        )
        return [IndexedDocument(*row) for row in self._database.rows(query)]

    def digest_of(self, path: str) -> str | None:
        """Return the digest a document was indexed with, or None where it is not in the index."""
        rows = self._database.rows("SELECT digest FROM documents WHERE path = ?", path)
        return rows[0][0] if rows else None

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over every distinct chunk, in the order they came; each has the metadata of its first place."""
        query = f"SELECT {CHUNK_COLUMNS}, {_METADATA_OF_CHUNK}, c.id FROM chunks c WHERE c.id > ? ORDER BY c.id LIMIT {_PAGE}"
        last = 0
        while page := self._database.rows(query, last):
            yield from (read_chunk(self._database, row[:-1]) for row in page)
            last = page[-1][-1]

    def chunk(self, chunk_id: str) -> Chunk:
        """Return a chunk by id.

        Raises:
            UnknownChunkError: There is none with that id.
        """
        query = f"SELECT {CHUNK_COLUMNS}, {_METADATA_OF_CHUNK} FROM chunks c WHERE c.name = ?"
        rows = self._database.rows(query, chunk_id)
        if not rows:
            raise UnknownChunkError(f"There is no chunk {chunk_id} in the index {self.directory}.")
        return read_chunk(self._database, rows[0])

    def search(self, question: str, k: int) -> list[Hit]:
        """Return the ``k`` chunks nearest to the question, best first.

        A chunk in several documents is one hit, in the first of its places by path.

        Raises:
            InputError: ``k`` is not positive.
            ModelError: The embedding model cannot be loaded.
        """
        if k < 1:
            raise InputError(f"k is {k}; give at least 1.")
        while True:
            name = self._embedding()
            vector = self._load(name).question(question)
            with self._database.transaction(write=False):
                if self._embedding() == name:
                    return [self._hit(chunk, score) for chunk, score in self._vectors.search(vector, k)]

    def _hit(self, chunk: int, score: float) -> Hit:
        query = (
            f"SELECT d.path, o.ordinal, {CHUNK_COLUMNS}, o.metadata FROM chunks c JOIN occurrences o ON o.chunk = c.id "
            "JOIN documents d ON d.id = o.document WHERE c.id = ? ORDER BY d.path, o.ordinal LIMIT 1"
        )
        for path, ordinal, *row in self._database.rows(query, chunk):
            return Hit(read_chunk(self._database, tuple(row)), score, path, ordinal)
        raise self._database.damaged(f"a vector belongs to chunk {chunk}, which is in no document")

    def neighbours(self, hit: Hit, before: int = 0, after: int = 1) -> list[Hit]:
        """Return the chunks that stand before and after a hit in its document, in document order, without the hit."""
        query = (
            f"SELECT o.ordinal, {CHUNK_COLUMNS}, o.metadata FROM documents d JOIN occurrences o ON o.document = d.id "
            "JOIN chunks c ON c.id = o.chunk WHERE d.path = ? AND o.ordinal BETWEEN ? AND ? AND o.ordinal <> ? "
            "ORDER BY o.ordinal"
        )
        rows = self._database.rows(query, hit.path, hit.ordinal - before, hit.ordinal + after, hit.ordinal)
        return [Hit(read_chunk(self._database, row), None, hit.path, ordinal) for ordinal, *row in rows]

    def rebuild(self, embedding: str | None = None, progress: Callable[[int], None] | None = None) -> None:
        """Embed every chunk again, with another embedding model if one is named. Searches see all old or all new.

        Args:
            embedding: The model to change to.
            progress: Called with the number of chunks embedded since its last call.

        Raises:
            ModelError: The embedding model cannot be loaded; the index is as it was.
            StoreError: The index cannot be written; it is as it was.
        """
        name = embedding or self._embedding()
        self._load(name)
        known: dict[str, Vectors] = {}
        while True:
            self._embed(name, (chunk for chunk in self.chunks() if chunk.id not in known), known, progress)
            with self._database.transaction():
                rows = self._database.rows("SELECT id, name FROM chunks")
                if all(chunk in known for _, chunk in rows):  # else another process has added some meanwhile
                    self._database.db.execute("DELETE FROM vectors")
                    for row, chunk in rows:
                        self._database.put_vectors(row, known[chunk])
                    changed = replace(self.manifest, embedding=name)
                    self._database.put_manifest(changed)
                    return

    def stats(self) -> IndexStats:
        """Count what is in the index."""
        with self._database.transaction(write=False):
            documents = self._database.rows("SELECT count(*) FROM documents")[0][0]
            chunks, nbytes = self._database.rows("SELECT count(*), ifnull(sum(length(token_ids)), 0) FROM chunks")[0]
            name = self._embedding()
        files = (self._database.path.with_name(FILE_NAME + suffix) for suffix in ("", "-wal"))
        size = sum(file.stat().st_size for file in files if file.exists())
        return IndexStats(documents, chunks, nbytes // 4, size, name)

    def close(self) -> None:
        """Close the database. The index must not be used afterwards."""
        self._database.close()

    def __enter__(self) -> Self:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _embedding(self) -> str:
        return self.manifest.embedding or DEFAULT_EMBEDDING

    def _load(self, name: str) -> Embedder:
        with self._loading:
            if self._embedder is None or self._embedder.name != name:
                self._embedder = Embedder.load(name)
            return self._embedder

    def _embed(
        self,
        name: str,
        chunks: Iterable[Chunk],
        known: dict[str, Vectors],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        for page in _pages(chunks):
            known.update(zip((c.id for c in page), self._load(name).texts([c.text for c in page]), strict=True))
            if progress is not None:
                progress(len(page))


def _pages(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    page: list[Chunk] = []
    for chunk in chunks:
        page.append(chunk)
        if len(page) == _PAGE:
            yield page
            page = []
    if page:
        yield page
