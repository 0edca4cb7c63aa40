"""Reads the documents that a vector store already holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag import InputError

_PAGE = 256


def existing_documents(base: VectorStore) -> Iterator[Document]:
    """Return the documents of a vector store, a page at a time; LangChain's interface cannot list all documents.

    Raises:
        InputError: The documents of this kind of vector store cannot be listed.
    """
    if isinstance(base, InMemoryVectorStore):
        return _in_memory(base)
    # Recognised by attributes, not by class: none of these packages is needed for another package's store.
    if hasattr(base, "_collection") and hasattr(base, "get"):
        return _chroma(base)
    if hasattr(base, "index_to_docstore_id") and hasattr(base, "docstore"):
        return _faiss(base)
    if hasattr(getattr(base, "client", None), "scroll") and hasattr(base, "collection_name"):
        return _qdrant(base)
    if hasattr(base, "EmbeddingStore") and hasattr(base, "get_collection"):
        if not getattr(base, "async_mode", False):
            return _pgvector(base)
    elif hasattr(base, "get_table_name") and hasattr(base, "get"):
        return _pgvector_table(base)
    raise InputError(
        f"The documents of {_named(base)} cannot be listed (those of Chroma, FAISS, Qdrant, pgvector and "
        "InMemoryVectorStore can); give them: documents=..."
    )


def _named(base: VectorStore) -> str:
    return f"a {type(base).__name__}" + (" in asynchronous mode" if getattr(base, "async_mode", False) else "")


def _in_memory(base: InMemoryVectorStore) -> Iterator[Document]:
    for held in list(base.store.values()):
        yield Document(id=held["id"], page_content=held["text"], metadata=held["metadata"])


def _chroma(base: Any) -> Iterator[Document]:
    first = 0
    while True:
        page = base.get(limit=_PAGE, offset=first, include=["documents", "metadatas"])
        for name, text, metadata in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
            yield Document(id=name, page_content=text or "", metadata=metadata or {})
        first += len(page["ids"])
        if len(page["ids"]) < _PAGE:
            return


def _faiss(base: Any) -> Iterator[Document]:
    for name in list(base.index_to_docstore_id.values()):
        found = base.docstore.search(name)
        if isinstance(found, Document):  # the result for a missing document is a message
            yield Document(id=name, page_content=found.page_content, metadata=found.metadata)


def _qdrant(base: Any) -> Iterator[Document]:
    behind = None
    while True:
        points, behind = base.client.scroll(
            base.collection_name, limit=_PAGE, offset=behind, with_payload=True, with_vectors=False
        )
        for point in points:
            text = point.payload.get(base.content_payload_key) or ""
            metadata = point.payload.get(base.metadata_payload_key) or {}
            yield Document(id=str(point.id), page_content=text, metadata=metadata)
        if behind is None:
            return


def _pgvector(base: Any) -> Iterator[Document]:
    """Yield the documents of `langchain_postgres.PGVector`, ordered by id: unordered pages may repeat or miss rows."""
    row = base.EmbeddingStore
    behind = ""
    while True:
        with base._make_sync_session() as session:
            held = session.query(row.id, row.document, row.cmetadata)
            held = held.filter(row.collection_id == base.get_collection(session).uuid, row.id > behind)
            page = held.order_by(row.id).limit(_PAGE).all()
        for name, text, metadata in page:
            yield Document(id=name, page_content=text or "", metadata=metadata or {})
        if len(page) < _PAGE:
            return
        behind = page[-1][0]


def _pgvector_table(base: Any) -> Iterator[Document]:
    """Yield the documents of `langchain_postgres.PGVectorStore`: first list all ids, as its pages have no order."""
    names = base.get(include=[])["ids"]
    for first in range(0, len(names), _PAGE):
        yield from base.get_by_ids(names[first : first + _PAGE])
