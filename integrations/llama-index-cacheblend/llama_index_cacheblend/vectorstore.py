"""Wraps a vector store: what is deleted or replaced in it is deleted from the KV store, too."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from llama_index.core import StorageContext
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, Document
from llama_index.core.storage.docstore.types import BaseDocumentStore
from llama_index.core.vector_stores import (
    MetadataFilter,
    MetadataFilters,
    SimpleVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag import BlendEngine, CacheBlendError, InputError, PrecomputeReport
from cacheblend_rag.frameworks import ExistingEstimate, StoreChunks, estimate_existing, owner_of, precompute_existing
from llama_index_cacheblend.handles import engine_for, refuse_unpicklable
from llama_index_cacheblend.nodes import node_forms, node_text, precompute_nodes

_log = logging.getLogger(__name__)


class _Holdings:
    """Holds what is known of a base: the nodes of each document, and the document of each node. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: defaultdict[str, set[str]] = defaultdict(set)
        self._document: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, nodes: Iterable[BaseNode]) -> None:
        with self._lock:
            for node in nodes:
                document = node.ref_doc_id or node.node_id
                self._remove(node.node_id)
                self._document[node.node_id] = document
                self._nodes[document].add(node.node_id)

    def remove(self, node_ids: Iterable[str]) -> None:
        with self._lock:
            for node_id in node_ids:
                self._remove(node_id)

    def of(self, document: str) -> set[str]:
        with self._lock:
            return set(self._nodes.get(document, ()))

    def every(self) -> set[str]:
        with self._lock:
            return set(self._document)

    def unknown(self, node_ids: Iterable[str]) -> list[str]:
        return [node_id for node_id in node_ids if node_id not in self._document]

    def _remove(self, node_id: str) -> None:
        document = self._document.pop(node_id, None)
        if document is not None:
            self._nodes[document].discard(node_id)
            if not self._nodes[document]:
                del self._nodes[document]


class CacheBlendVectorStore(BasePydanticVectorStore):
    """Wraps any vector store: nodes that go in have their KV precomputed, and KV that no node needs any more is deleted.

    Whatever changes an index goes through its vector store: `delete_ref_doc`, `delete_nodes`, `refresh_ref_docs`, and an
    `IngestionPipeline`'s upserts. KV belongs to a text, not to a node: it goes when no other node on the engine has that text,
    and with it that of the text without its metadata and of its renditions.

    What was put into the base before this process started is looked up in ``docstore``, else in the base, when it is deleted; a
    base that holds no text (such as `SimpleVectorStore`) needs the docstore for that.

    Everything this class does not define is the base's.

    Attributes:
        base: The vector store that does the work.
        engine: The engine that answers. Held, not owned.
        docstore: Where the index keeps its nodes.
        precompute: Whether to compute KV when nodes are added; otherwise it is computed with the first prompt that needs it.
    """

    base: BasePydanticVectorStore
    engine: BlendEngine = Field(exclude=True)
    docstore: BaseDocumentStore | None = Field(default=None, exclude=True)
    precompute: bool = True

    _known: _Holdings = PrivateAttr()
    _chunks: StoreChunks = PrivateAttr()

    def __init__(
        self,
        base: BasePydanticVectorStore | None = None,
        engine: BlendEngine | None = None,
        docstore: BaseDocumentStore | None = None,
        precompute: bool = True,
        **kwargs: Any,
    ) -> None:
        """Wrap ``base``; None makes one in memory. Without an engine it is that of `Settings.llm`. See above for the rest.

        Raises:
            InputError: There is no engine.
        """
        base = SimpleVectorStore() if base is None else base
        own = {"stores_text": base.stores_text, "is_embedding_query": base.is_embedding_query}
        engine = engine_for(engine, type(self).__name__)
        given = {"base": base, "engine": engine, "docstore": docstore, "precompute": precompute}
        super().__init__(**{**kwargs, **own, **given})
        self._known = owner_of(base, _Holdings)
        # A node has two texts: with its metadata, and without.
        self._chunks = StoreChunks(engine, self._known, forms=2)

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the class by."""
        return "CacheBlendVectorStore"

    @classmethod
    def within(cls, storage: StorageContext, engine: BlendEngine, precompute: bool = True) -> StorageContext:
        """Wrap the vector store of a storage context, in place, and return it: for an index you make or load with it."""
        base = storage.vector_store
        if not isinstance(base, cls):
            storage.add_vector_store(cls(base, engine, storage.docstore, precompute), DEFAULT_VECTOR_STORE)
        return storage

    def estimate_existing(self, nodes: Iterable[BaseNode] | None = None) -> ExistingEstimate:
        """Return what :meth:`precompute_existing` will take: chunks, room and time. A few nodes are computed to tell.

        Raises:
            InputError: Neither base nor docstore can list the nodes, and they are not given.
            StoreError: The KV store cannot be written.
        """
        existing = self._existing() if nodes is None else nodes
        return estimate_existing(self.engine, map(node_text, existing))

    def precompute_existing(
        self, nodes: Iterable[BaseNode] | None = None, progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Compute the KV of the nodes that were there before, with their metadata.

        What is stored is skipped: call it again after a stop.

        Args:
            nodes: All of them, where neither base nor docstore can list them.
            progress: Called with the number of nodes finished since its last call.

        Raises:
            InputError: Neither base nor docstore can list the nodes, and they are not given.
            StoreError: The KV store cannot be written. What was stored before stays.
        """
        return precompute_existing(self._existing() if nodes is None else nodes, self._compute, progress)

    @property
    def client(self) -> Any:
        """Return the base's client."""
        return self.base.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes to the base, then precompute their KV; return their ids.

        A node that replaces another one under its id lets go of the former text. A KV store that refuses is a warning in the log:
        the prompt computes what is missing.
        """
        self._learn(node.node_id for node in nodes)
        ids = self.base.add(list(nodes), **kwargs)
        self._take_in(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Async twin of :meth:`add`."""
        await asyncio.to_thread(self._learn, [node.node_id for node in nodes])
        ids = await self.base.async_add(list(nodes), **kwargs)
        await asyncio.to_thread(self._take_in, nodes)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes from the base, and the KV that no other node needs."""
        names = self._nodes_of(ref_doc_id)
        self.base.delete(ref_doc_id, **delete_kwargs)
        self._let_go(names)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Async twin of :meth:`delete`."""
        # Before anything is awaited: LlamaIndex deletes from the docstore at the same time.
        names = self._nodes_of(ref_doc_id)
        await self.base.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._let_go, names)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes from the base, and the KV that no other node needs."""
        names = self._chosen(node_ids, filters)
        self.base.delete_nodes(node_ids, filters, **delete_kwargs)
        self._let_go(names)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Async twin of :meth:`delete_nodes`."""
        names = self._chosen(node_ids, filters)
        await self.base.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(self._let_go, names)

    def clear(self) -> None:
        """Delete everything from the base, and the KV that no node of another store needs."""
        names = self._chosen(None, None)
        self.base.clear()
        self._let_go(names)

    async def aclear(self) -> None:
        """Async twin of :meth:`clear`."""
        names = self._chosen(None, None)
        await self.base.aclear()
        await asyncio.to_thread(self._let_go, names)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return the base's nodes."""
        return self.base.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Async twin of :meth:`get_nodes`."""
        return await self.base.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the base; nodes that it returns are registered with the engine."""
        return self._found(self.base.query(query, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Async twin of :meth:`query`."""
        return await asyncio.to_thread(self._found, await self.base.aquery(query, **kwargs))

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Write the base to a file."""
        self.base.persist(persist_path, fs=fs)

    def __getattr__(self, name: str) -> Any:
        """Look in the base for what is not here."""
        if name.startswith("_") or name in type(self).model_fields:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be sent to another process with a model inside."""
        refuse_unpicklable(self.engine, type(self).__name__)
        return super().__getstate__()

    def _found(self, result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        self._hold(result.nodes or ())
        return result

    def _hold(self, nodes: Iterable[BaseNode]) -> None:
        """Register nodes, and note which of their texts they hold."""
        nodes = list(nodes)
        self._known.add(nodes)
        self._chunks.hold((node.node_id, node_forms(node)) for node in nodes)

    def _existing(self) -> Sequence[BaseNode]:
        """Return all nodes: of a base that keeps their text, else of the docstore."""
        if self.base.stores_text and (found := self._asked_of_base(None, None)):
            return found
        # A pipeline's docstore keeps the documents that went in, not the nodes made of them, which no prompt will hold whole.
        named = getattr(getattr(self.base, "data", None), "embedding_dict", None)  # SimpleVectorStore's
        kept = {} if self.docstore is None else self.docstore.docs
        nodes = [n for n in kept.values() if (not isinstance(n, Document) if named is None else n.node_id in named)]
        if not nodes:
            raise InputError(
                f"Neither {type(self.base).__name__} nor the docstore can list the nodes (a pipeline's docstore has its "
                "documents, not their nodes); give the index's docstore= to CacheBlendVectorStore, or the nodes: nodes=..."
            )
        return nodes

    def _compute(self, nodes: Sequence[BaseNode]) -> PrecomputeReport:
        self._hold(nodes)
        return precompute_nodes(self.engine, nodes)

    def _take_in(self, nodes: Sequence[BaseNode]) -> None:
        nodes = list({node.node_id: node for node in nodes}.values())  # of one id the base keeps the last
        self._hold(nodes)
        if not self.precompute:
            return
        try:
            report = precompute_nodes(self.engine, nodes)
        except CacheBlendError as error:
            _log.warning("The KV of %d nodes was not precomputed: %s", len(nodes), error)
            return
        if report.failed:
            name, why = next(iter(report.failed.items()))
            _log.warning(
                "The KV of %d of %d nodes is not stored; chunk %s: %s", len(report.failed), len(nodes), name, why
            )

    def _learn(self, node_ids: Iterable[str]) -> None:
        """Note what is held under these ids, before it changes: it may be from before this process."""
        names = self._known.unknown(node_ids)
        if names and self.docstore is not None:
            kept = [self.docstore.get_document(name, raise_error=False) for name in names]
            self._hold(node for node in kept if node is not None)
            names = self._known.unknown(names)
        if names:
            self._hold(self._asked_of_base(names, None))

    def _nodes_of(self, ref_doc_id: str) -> set[str]:
        """Return the ids of a document's nodes, and note what they hold."""
        info = None if self.docstore is None else self.docstore.get_ref_doc_info(ref_doc_id)
        self._learn(info.node_ids if info is not None else ())
        self._hold(
            self._asked_of_base(None, MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=ref_doc_id)]))
        )
        return self._known.of(ref_doc_id)

    def _chosen(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> set[str]:
        """Return which nodes are meant, and note what they hold."""
        if filters is None and node_ids is not None:
            self._learn(node_ids)
            return set(node_ids)
        found = self._asked_of_base(node_ids, filters)
        self._hold(found)
        return {node.node_id for node in found} if filters is not None else self._known.every()

    def _asked_of_base(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[BaseNode]:
        # Not every base can say what it holds, or filters by what it is asked for.
        if not self.base.stores_text:
            return []
        with suppress(NotImplementedError, ValueError):
            try:
                return list(self.base.get_nodes(node_ids, filters))
            except AssertionError:  # Postgres' wants one of them, and takes no ids for all of them
                return list(self.base.get_nodes(node_ids or [], filters))
        return []

    def _let_go(self, node_ids: Iterable[str]) -> None:
        names = set(node_ids)
        self._known.remove(names)
        self._chunks.release(names)
