"""Stores documents, chunks and embeddings in one file beside the KV store, and searches the chunks by meaning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
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
    """Counts an index's contents. ``tokens`` counts every distinct chunk once; ``nbytes`` is the size of the file."""

    documents: int
    chunks: int
    tokens: int
    nbytes: int
    embedding: str


class ChunkIndex(IndexDatabase):
    """Stores the documents, chunks and vectors that were indexed in one directory, but no KV.

    Thread-safe; any number of processes may use the index at the same time. The first call that needs the embedding
    model or FAISS loads it. Searches see the changes of other processes.

    Attributes:
        directory: Directory of the index and of the KV store.

    Example:
        Search an index without an engine::

            with ChunkIndex("~/.cache/acme") as index:
                for hit in index.search("Who approves travel above 500 euros?", k=3):
                    print(f"{hit.score:.2f} {hit.path}: {hit.text}")
    """

    def __init__(
        self,
        directory: Path | str,
        config: IndexConfig | None = None,
        query_encoder: str | Path | None = None,
        own: Iterable[str] = (),
    ):
        """Open the index in ``directory``; with a config, create a missing index.

        Args:
            directory: Directory of the index.
            config: Settings that an existing index must have, and with which a missing index is made.
            query_encoder: Directory of a model that embeds questions in place of the index's own; see
                :meth:`Embedder.asked_by`.
            own: Names of settings of which an existing index keeps its own values.

        Raises:
            StoreMismatchError: The index was made with another model or other settings.
            StoreError: There is no index (and no config), the index is damaged, or the directory cannot be used.
        """
        self.directory = from_home(directory)
        super().__init__(self.directory, config, own)
        self._query_encoder = query_encoder
        self._search = VectorSearch(self.vectors)
        self._embedder: Embedder | None = None
        self._loading = threading.Lock()

    def add(
        self, document_path: str, digest: str, chunks: Iterable[Chunk], progress: Callable[[int], None] | None = None
    ) -> list[Chunk]:
        """Index a document in one transaction, in place of the document that was indexed under its path.

        Args:
            document_path: Path that identifies the document.
            digest: Content hash, for :meth:`digest_of`.
            chunks: Chunks of the document in order.
            progress: Called with the number of chunks embedded since the last call.

        Returns:
            The chunks that no document holds any more, without metadata.

        Raises:
            StoreError: The index cannot be written, and is unchanged.
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
        """Iterate over every distinct chunk in order of insertion; each chunk has the metadata of its first place."""
        last = 0
        while page := self.chunks_after(last, _PAGE):
            yield from (chunk for _, chunk in page)
            last, _ = page[-1]

    def chunk(self, chunk_id: str) -> Chunk:
        """Return a chunk by id; raise UnknownChunkError if the index has no chunk with that id."""
        chunk = self.named(chunk_id)
        if chunk is None:
            raise UnknownChunkError(f"There is no chunk {chunk_id} in the index {self.directory}.")
        return chunk

    def chunks_of(self, path: str) -> list[Chunk]:
        """Return a document's chunks in order, or an empty list if the document is not in the index."""
        return [chunk for _, chunk in self.chunks_between(path, 0, _LAST)]

    def search(self, question: str, k: int) -> list[Hit]:
        """Return the ``k`` chunks nearest to the question, best first.

        A chunk that stands in several documents is one hit, at the chunk's first place by path.

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
                    placed = ((score, self.first_place(row)) for row, score in self._search.search(vector, k))
                    return [Hit(chunk, score, path, ordinal) for score, (path, ordinal, chunk) in placed]

    def neighbours(self, hit: Hit, before: int = 0, after: int = 1) -> list[Hit]:
        """Return the chunks before and after a hit in the hit's document, in document order, without the hit."""
        around = self.chunks_between(hit.path, hit.ordinal - before, hit.ordinal + after)
        return [Hit(chunk, None, hit.path, ordinal) for ordinal, chunk in around if ordinal != hit.ordinal]

    def nearest(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        """Return id and cosine similarity of the ``k`` chunks nearest to a unit vector ``[dim]``, best first."""
        with self.transaction(write=False):
            found = self._search.search(vector, k)
            return [(self.first_place(row)[2].id, score) for row, score in found]

    def load_embedder(self) -> Embedder:
        """Load and return the embedding model, which otherwise loads with the first call that needs the model.

        Raises:
            ModelError: The embedding model cannot be loaded.
        """
        return self._load(self._embedding())

    def rebuild(self, embedding: str | None = None, progress: Callable[[int], None] | None = None) -> None:
        """Embed every chunk again, optionally with another embedding model. Searches see all old or all new vectors.

        ``progress`` is called with the number of chunks embedded since the last call.

        Raises:
            ModelError: The embedding model cannot be loaded; the index is unchanged.
            StoreError: The index cannot be written, and is unchanged.
        """
        name = embedding or self._embedding()
        self._load(name)
        known: dict[str, Vectors] = {}
        while True:
            self._embed(name, (chunk for chunk in self.chunks() if chunk.id not in known), known, progress)
            with self.transaction():
                rows: dict[str, int] = dict(self.rows("SELECT name, id FROM chunks"))
                if rows.keys() <= known.keys():  # else another process has added chunks meanwhile
                    self.vectors.replace((row, known[chunk_id]) for chunk_id, row in rows.items())
                    self.put_config(replace(self.config, embedding=name))
                    return

    def note_writer(self, writer: WrittenBy) -> None:
        """Record the KV writer that has written the KV of all chunks, in place of the writer recorded before."""
        with self.transaction():
            self.put_config(self.config.written_by(writer))

    def stats(self) -> IndexStats:
        """Count the contents of the index."""
        with self.transaction(write=False):
            documents = self.rows("SELECT count(*) FROM documents")[0][0]
            chunks, tokens = self.rows("SELECT count(*), ifnull(sum(length(token_ids)), 0) / 4 FROM chunks")[0]
            return IndexStats(documents, chunks, tokens, self.path.stat().st_size, self._embedding())

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
        left = iter(chunks)
        while page := list(islice(left, _EMBEDDED_AT_ONCE)):  # embedding a large document takes minutes
            known.update(zip((c.id for c in page), self._load(name).texts([c.text for c in page]), strict=True))
            if progress is not None:
                progress(len(page))
