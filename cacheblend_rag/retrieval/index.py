"""Keeps documents, their chunks and embeddings in one file beside the KV store, and searches them by meaning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkSource
from cacheblend_rag.retrieval.database import IndexConfig, IndexDatabase, IndexedDocument
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder, Vectors, VectorSearch
from cacheblend_rag.retrieval.hit import Hit
from cacheblend_rag.spans import span
from cacheblend_rag.store.identity import WrittenBy

__all__ = ["DEFAULT_EMBEDDING", "ChunkIndex", "Hit", "IndexConfig", "IndexStats", "IndexedDocument"]

_PAGE = 256
_EMBEDDED_AT_ONCE = 32
_LAST = (1 << 63) - 1


@dataclass(frozen=True)
class IndexStats:
    """Contents of an index. ``tokens`` counts every distinct chunk once; ``nbytes`` is the size of the file."""

    documents: int
    chunks: int
    tokens: int
    nbytes: int
    embedding: str


class ChunkIndex(IndexDatabase, ChunkSource):
    """Keeps what was indexed in one directory: documents, chunks, vectors, but no KV.

    Thread-safe; any number of processes may use it at once. The embedding model and FAISS are loaded by the first call that
    needs them. The search follows what other processes change.

    Attributes:
        directory: Where the index is; the KV store's directory.
    """

    def __init__(
        self,
        directory: Path | str,
        config: IndexConfig | None = None,
        query_encoder: str | Path | None = None,
        check: bool = True,
    ):
        """Open the index in ``directory``; with a config, create it where there is none.

        Args:
            directory: Where it is.
            config: What it must have been made with, or is made with.
            query_encoder: Directory of a model that embeds questions in place of the index's own; see :meth:`Embedder.asked_by`.
            check: False for an index that may have been made with another config; the caller looks.

        Raises:
            StoreMismatchError: The index was made with another model or other settings.
            StoreError: There is none (and no config), it is damaged, or the directory cannot be used.
        """
        self.directory = from_home(directory)
        super().__init__(self.directory, config, check)
        self._query_encoder = query_encoder
        self._search = VectorSearch(self.vectors)
        self._embedder: Embedder | None = None
        self._loading = threading.Lock()

    def add(
        self, document_path: str, digest: str, chunks: Iterable[Chunk], progress: Callable[[int], None] | None = None
    ) -> list[Chunk]:
        """Index a document in one transaction, in place of what was indexed under that path.

        Args:
            document_path: Identity of the document.
            digest: Content hash, for :meth:`digest_of`.
            chunks: Its chunks in order.
            progress: Called with the number of chunks embedded since its last call.

        Returns:
            The chunks that no document holds any more, without metadata.

        Raises:
            StoreError: It cannot be written; the index is as it was.
            ModelError: The embedding model cannot be loaded.
        """
        ordered = list(chunks)
        distinct = {chunk.id: chunk for chunk in ordered}
        known: dict[str, Vectors] = {}
        while True:
            with self.transaction(write=False):
                name = self._embedding()
                present = self.vectors.embedded(distinct)
            missing = [c for c in distinct.values() if c.id not in present and c.id not in known]
            self._embed(name, missing, known, progress)
            with self.transaction():
                if self._embedding() != name:
                    known.clear()  # another process has rebuilt the index with another model meanwhile
                elif distinct.keys() <= known.keys() | self.vectors.embedded(distinct):
                    return self.replace_document(document_path, digest, ordered, known)

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over every distinct chunk, in the order they came; each has the metadata of its first place."""
        last = 0
        while page := self.chunks_after(last, _PAGE):
            yield from (chunk for _, chunk in page)
            last, _ = page[-1]

    def chunk(self, chunk_id: str) -> Chunk:
        """Return a chunk by id.

        Raises:
            UnknownChunkError: There is none with that id.
        """
        chunk = self.named(chunk_id)
        if chunk is None:
            raise UnknownChunkError(f"There is no chunk {chunk_id} in the index {self.directory}.")
        return chunk

    def chunk_at(self, row: int) -> Chunk | None:
        return next(iter(self.find_chunks("c.id = ?", row)), None)

    def named(self, chunk_id: str) -> Chunk | None:
        return next(iter(self.find_chunks("c.name = ?", chunk_id)), None)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        return self.find_chunks("c.name > ? ORDER BY c.name LIMIT ?", chunk_id, most)

    def chunks_of(self, path: str) -> list[Chunk]:
        """Return a document's chunks in order; none where it is not in the index."""
        return [chunk for _, chunk in self.chunks_between(path, 0, _LAST)]

    def search(self, question: str, k: int) -> list[Hit]:
        """Return the ``k`` chunks nearest to the question, best first.

        A chunk in several documents is one hit, in the first of its places by path.

        Raises:
            InputError: ``k`` is not positive.
            ModelError: The embedding model cannot be loaded.
        """
        if k < 1:
            raise InputError(f"k is {k}; give at least 1.")
        with span("cacheblend.retrieve") as told:
            found = self._found(question, k)
            told.set_attribute("cacheblend.hits", len(found))
            return found

    def _found(self, question: str, k: int) -> list[Hit]:
        while True:
            name = self._embedding()
            vector = self._load(name).question(question)
            with self.transaction(write=False):
                if self._embedding() == name:
                    return [self._hit(row, score) for row, score in self._search.search(vector, k)]

    def _hit(self, row: int, score: float) -> Hit:
        path, ordinal, chunk = self.first_place(row)
        return Hit(chunk, score, path, ordinal)

    def neighbours(self, hit: Hit, before: int = 0, after: int = 1) -> list[Hit]:
        """Return the chunks that stand before and after a hit in its document, in document order, without the hit."""
        around = self.chunks_between(hit.path, hit.ordinal - before, hit.ordinal + after)
        return [Hit(chunk, None, hit.path, ordinal) for ordinal, chunk in around if ordinal != hit.ordinal]

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """Return ids and cosine similarities of the ``k`` chunks nearest to a question's unit vector ``[dim]``, best first."""
        with self.transaction(write=False):
            found = self._search.search(vector, k)
            return [(self.first_place(row)[2].id, score) for row, score in found]

    def load_embedder(self) -> Embedder:
        """Load the embedding model now, which the first call that needs it would do, and return it.

        Raises:
            ModelError: It cannot be loaded.
        """
        return self._load(self._embedding())

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
            with self.transaction():
                rows = self.chunk_rows()
                if rows.keys() <= known.keys():  # else another process has added some meanwhile
                    self.vectors.replace((row, known[chunk_id]) for chunk_id, row in rows.items())
                    self.put_config(replace(self.config, embedding=name))
                    return

    def note_writer(self, writer: WrittenBy) -> None:
        """Note that a KV writer has written the KV of all chunks, in place of what was noted before.

        Raises:
            StoreError: The index cannot be written.
        """
        with self.transaction():
            self.put_config(self.config.written_by(writer))

    def stats(self) -> IndexStats:
        """Count what is in the index."""
        with self.transaction(write=False):
            return IndexStats(*self.counts(), nbytes=self.path.stat().st_size, embedding=self._embedding())

    def _embedding(self) -> str:
        return self.config.embedding or DEFAULT_EMBEDDING

    def _load(self, name: str) -> Embedder:
        with self._loading:
            if self._embedder is None or self._embedder.name != name:
                embedder = Embedder.load(name)
                self._embedder = embedder if self._query_encoder is None else embedder.asked_by(self._query_encoder)
            return self._embedder

    def _embed(
        self,
        name: str,
        chunks: Iterable[Chunk],
        known: dict[str, Vectors],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        for page in _pages(chunks):  # small ones: a large document is minutes of work
            known.update(zip((c.id for c in page), self._load(name).texts([c.text for c in page]), strict=True))
            if progress is not None:
                progress(len(page))


def _pages(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    left = iter(chunks)
    while page := list(islice(left, _EMBEDDED_AT_ONCE)):
        yield page
