"""Splits documents into chunks, precomputes their KV, and embeds texts, with the parts of `cacheblend-rag`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.embeddings import Embeddings

from cacheblend_rag import BlendEngine, CacheBlendError, Chunk, PrecomputeReport, split_text
from cacheblend_rag.frameworks import DEFAULT_CHUNK_TOKENS, DEFAULT_EMBEDDING, Embedder, open_embedder, text_vectors


class ChunkSplitter(BaseDocumentTransformer):
    """Splits documents at sentence and paragraph ends, by the tokens of the engine's own model.

    Any other splitter works, too; this splitter counts the tokens that a chunk costs.

    Example:
        Split documents into chunks of at most 512 tokens::

            splitter = ChunkSplitter(engine, max_tokens=512)
            chunks = splitter.split_documents(documents)
    """

    def __init__(self, engine: BlendEngine, max_tokens: int = DEFAULT_CHUNK_TOKENS, overlap: int = 0):
        """Split with ``engine``'s tokenizer into chunks of at most ``max_tokens``, with about ``overlap`` repeated."""
        self.engine, self.max_tokens, self.overlap = engine, max_tokens, overlap

    def split_documents(self, documents: Sequence[Document]) -> list[Document]:
        """Return the chunks as documents; ``start_index`` (characters) is added to their metadata.

        Raises:
            InputError: ``max_tokens`` or ``overlap`` is out of range.
        """
        split = []
        for document in documents:
            for chunk in split_text(document.page_content, self.engine.tokenizer, self.max_tokens, self.overlap):
                metadata = {**document.metadata, "start_index": chunk.metadata["start"]}
                split.append(Document(page_content=chunk.text, metadata=metadata))
        return split

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """Return the chunks as documents; see :meth:`split_documents`."""
        return self.split_documents(documents)


class BundledEmbeddings(Embeddings):
    """Embeds with a sentence-transformers model, by default the bundled all-MiniLM-L6-v2.

    A text longer than the model's limit gets the mean of its windows' vectors. The model is loaded on first use.

    Example:
        Fill a vector store in memory::

            store = InMemoryVectorStore(BundledEmbeddings())
            store.add_documents(chunks)
    """

    def __init__(self, name: str = DEFAULT_EMBEDDING, query_encoder: str | Path | None = None):
        """Use the default, a directory, or a sentence-transformers model of the hub.

        ``query_encoder`` is the directory of a model made by `cacheblend tune-retriever`; that model embeds the
        questions.
        """
        self.name, self.query_encoder = name, query_encoder
        self._embedder: Embedder | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the names of the models; an unpickled copy loads its own models."""
        return {"name": self.name, "query_encoder": self.query_encoder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up the object from the names of its models."""
        self.__init__(**state)  # type: ignore[misc]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a unit vector for each text."""
        return text_vectors(self._model(), texts)

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a question."""
        vector: list[float] = self._model().question(text).tolist()
        return vector

    def _model(self) -> Embedder:
        with self._lock:
            if self._embedder is None:
                self._embedder = open_embedder(self.name, self.query_encoder)
            return self._embedder


def precompute(engine: BlendEngine, chunks: list[Chunk]) -> PrecomputeReport:
    """Compute and store the chunks' KV; warn if KV cannot be stored, because a prompt computes missing KV itself."""
    try:
        report = engine.precompute(chunks)
    except CacheBlendError as error:
        warnings.warn(f"The KV of {len(chunks)} chunks was not precomputed: {error}", stacklevel=3)
        return PrecomputeReport(failed={chunk.id: str(error) for chunk in chunks})
    if report.failed:
        reason = next(iter(report.failed.values()))
        warnings.warn(f"The KV of {len(report.failed)} of {len(chunks)} chunks is not stored: {reason}", stacklevel=3)
    return report
