"""Wraps a vector store so that the stored KV follows the store's documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag import BlendEngine, Chunk, InputError, PrecomputeReport
from cacheblend_rag.frameworks import ExistingEstimate, StoreChunks, estimate_existing, owner_of, precompute_existing
from langchain_cacheblend.documents import precompute
from langchain_cacheblend.existing import existing_documents
from langchain_cacheblend.runs import RETRIEVALS, retrieved

_Item = TypeVar("_Item", Document, tuple[Document, float])


class CacheBlendVectorStore(VectorStore):
    """Wraps any vector store: precomputes the KV of added documents, and registers found documents with the engine.

    Works with LangChain's ``index()``. KV belongs to a chunk's text, not to a document's id: the same text is computed
    once, and deleting a document drops its KV only if no other document uses that text. Documents that the base held
    before this process started are unknown until they are retrieved. If their KV is dropped together with a copy, the
    next prompt computes it.

    All other attributes and methods are the base's.

    Attributes:
        base: The wrapped vector store.
        engine: The engine that answers; the vector store does not close it.

    Example:
        Add documents with their KV, then search::

            store = CacheBlendVectorStore(base=your_vector_store, engine=engine)
            store.add_documents(chunks)
            documents = store.similarity_search("Who is the captain?")
    """

    def __init__(self, base: VectorStore, engine: BlendEngine):
        """Wrap ``base``."""
        self.base, self.engine = base, engine
        self._chunks = StoreChunks(engine, owner_of(base, object))

    @property
    def embeddings(self) -> Embeddings | None:
        """Return the base's embeddings."""
        return self.base.embeddings

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        engine: BlendEngine | None = None,
        base: VectorStore | None = None,
        **kwargs: Any,
    ) -> CacheBlendVectorStore:
        """Return a store filled with ``texts``.

        Args:
            texts: One chunk each.
            embedding: Embedding of the store in memory that is made if ``base`` is None.
            metadatas: One for each text.
            ids: One for each text.
            engine: The engine that answers.
            base: The store to fill; None makes one in memory.
            **kwargs: Passed to the base's ``add_documents``.

        Raises:
            InputError: No engine is given.
        """
        if engine is None:
            raise InputError("CacheBlendVectorStore needs the engine that answers; give engine=.")
        store = cls(base if base is not None else InMemoryVectorStore(embedding), engine)
        store.add_texts(texts, metadatas, ids=ids, **kwargs)
        return store

    def estimate_existing(self, documents: Iterable[Document] | None = None) -> ExistingEstimate:
        """Return the chunks, bytes and time of :meth:`precompute_existing`, measured by computing a few documents.

        Raises:
            InputError: The base cannot list its documents, and they are not given.
            StoreError: The KV store cannot be written.
        """
        existing = existing_documents(self.base) if documents is None else documents
        return estimate_existing(self.engine, (document.page_content for document in existing))

    def precompute_existing(
        self, documents: Iterable[Document] | None = None, progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Compute the KV of documents already in the base. Stored KV is skipped: call again after an interruption.

        Afterwards, deleting one of these documents drops its KV, too.

        Args:
            documents: All documents of the base, with their ids, if the base cannot list them.
            progress: Called with the number of documents finished since its last call.

        Raises:
            InputError: The base cannot list its documents, and they are not given.
            StoreError: The KV store cannot be written. KV stored before the error stays.
        """
        existing = existing_documents(self.base) if documents is None else documents
        return precompute_existing(existing, self._compute, progress)

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents to the base, then precompute their KV; return their ids.

        A document that replaces another document under its id releases the former text. If the KV store fails, a
        warning is issued, and prompts compute the missing KV.
        """
        self._learn(_given_ids(documents, kwargs))
        ids = self.base.add_documents(documents, **kwargs)
        self._take_in(documents, ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents asynchronously; see :meth:`add_documents`."""
        await self._alearn(_given_ids(documents, kwargs))
        ids = await self.base.aadd_documents(documents, **kwargs)
        await asyncio.to_thread(self._take_in, documents, ids)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents from the base, and the KV of texts no other document uses; return the base's result."""
        names = ids if ids is not None else self._chunks.names()
        self._learn(names)
        done = self.base.delete(ids, **kwargs)
        if done is not False and names:
            left = None
            with suppress(NotImplementedError):
                left = self.base.get_by_ids(names)
            self._let_go(names, left, named=ids is not None)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents asynchronously; see :meth:`delete`."""
        names = ids if ids is not None else self._chunks.names()
        await self._alearn(names)
        done = await self.base.adelete(ids, **kwargs)
        if done is not False and names:
            left = None
            with suppress(NotImplementedError):
                left = await self.base.aget_by_ids(names)
            await asyncio.to_thread(self._let_go, names, left, named=ids is not None)
        return done

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the base's documents with these ids; missing documents are left out."""
        return self._found(self.base.get_by_ids(ids))

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents asynchronously; see :meth:`get_by_ids`."""
        return await asyncio.to_thread(self._found, await self.base.aget_by_ids(ids))

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the base's documents nearest to ``query``, and register them with the engine."""
        return self._found(self.base.similarity_search(query, k=k, **kwargs))

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Search asynchronously; see :meth:`similarity_search`."""
        return await asyncio.to_thread(self._found, await self.base.asimilarity_search(query, k=k, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return the base's attribute for any name not defined here: ``save_local``, ``client``..."""
        if name in ("base", "engine") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def _found(self, found: Sequence[_Item]) -> list[_Item]:
        """Register documents, or pairs of a document and its score, and record which documents hold their text."""
        documents = [item[0] if isinstance(item, tuple) else item for item in found]
        self._hold(documents)
        RETRIEVALS.note(None, retrieved(documents))
        return list(found)

    def _hold(self, documents: Sequence[Document]) -> list[Chunk]:
        return self._chunks.hold((document.id, [document.page_content]) for document in documents)

    def _learn(self, names: Sequence[str]) -> None:
        """Record the base's documents with these ids before they change: they may predate this process."""
        if names:
            with suppress(NotImplementedError):
                self._hold(self.base.get_by_ids(names))

    async def _alearn(self, names: Sequence[str]) -> None:
        if names:
            with suppress(NotImplementedError):
                await asyncio.to_thread(self._hold, await self.base.aget_by_ids(names))

    def _compute(self, documents: Sequence[Document]) -> PrecomputeReport:
        return self.engine.precompute(self._hold(documents))

    def _take_in(self, documents: Sequence[Document], ids: Sequence[str]) -> None:
        # Some bases return fewer ids than documents.
        named = zip([*ids, *(None for _ in documents)], documents, strict=False)
        precompute(self.engine, self._chunks.hold((name, [document.page_content]) for name, document in named))

    def _let_go(self, names: Sequence[str], left: Sequence[Document] | None, *, named: bool) -> None:
        """Release deleted documents, except those ``left`` in the base; None if the base cannot list them."""
        # If it cannot, deletions by ids count as done, and other deletions as not done.
        kept = set(() if named else names) if left is None else {document.id or "" for document in left}
        self._chunks.release([name for name in names if name not in kept])


def _given_ids(documents: Sequence[Document], kwargs: dict[str, Any]) -> list[str]:
    ids = kwargs.get("ids") or [document.id for document in documents]
    return [name for name in ids if name is not None]


def _searching(name: str) -> Callable[..., Any]:
    def search(self: CacheBlendVectorStore, *args: Any, **kwargs: Any) -> Any:
        return self._found(getattr(self.base, name)(*args, **kwargs))

    return search


def _asearching(name: str) -> Callable[..., Any]:
    async def search(self: CacheBlendVectorStore, *args: Any, **kwargs: Any) -> Any:
        found = await getattr(self.base, name)(*args, **kwargs)
        return await asyncio.to_thread(self._found, found)

    return search


# Wrap every search method of the base, so that the found documents are registered with the engine.
for _kind in (
    "search",
    "similarity_search_with_score",
    "similarity_search_with_relevance_scores",
    "similarity_search_by_vector",
    "max_marginal_relevance_search",
    "max_marginal_relevance_search_by_vector",
):
    for _name, _make in ((_kind, _searching), (f"a{_kind}", _asearching)):
        _method = _make(_name)
        _method.__name__, _method.__doc__ = (
            _name,
            f"The base's ``{_name}``; what it finds is registered with the engine.",
        )
        setattr(CacheBlendVectorStore, _name, _method)
