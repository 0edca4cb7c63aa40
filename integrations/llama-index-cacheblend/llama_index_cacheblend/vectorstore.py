"""Wraps a vector store: nodes deleted or replaced in the vector store are deleted from the KV store, too."""

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
    """Holds the known nodes of a base: the nodes of each document, and the document of each node. Thread-safe."""

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
    """Wraps any vector store: precomputes the KV of added nodes, and deletes KV that no node needs any more.

    Every change of an index goes through its vector store: `delete_ref_doc`, `delete_nodes`, `refresh_ref_docs`, and an
    `IngestionPipeline`'s upserts. KV belongs to a text, not to a node. The KV of a text is deleted when no other node
    on the engine has the text, together with the KV of the text without its metadata and of its JSON forms.

    Nodes that were in the base before this process started are looked up in ``docstore``, else in the base, when they
    are deleted. A base that holds no text (such as `SimpleVectorStore`) needs the docstore for the lookup.

    All other attributes and methods are the base's.

    Attributes:
        base: The wrapped vector store.
        engine: The engine that answers; the vector store does not close it.
        docstore: Docstore of the index's nodes.
        precompute: Whether to compute KV when nodes are added; otherwise KV is computed with the first prompt that
            needs it.

    Example:
        Index documents, with their KV, in a wrapped vector store::

            store = CacheBlendVectorStore(your_vector_store, engine)
            storage = StorageContext.from_defaults(vector_store=store)
            index = VectorStoreIndex.from_documents(documents, storage_context=storage)
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
        """Wrap ``base``; None makes one in memory. If ``engine`` is None, take the engine of `Settings.llm`.

        Raises:
            InputError: There is no engine.
        """
        base = SimpleVectorStore() if base is None else base
        own = {"stores_text": base.stores_text, "is_embedding_query": base.is_embedding_query}
        engine = engine_for(engine, type(self).__name__)
        given = {"base": base, "engine": engine, "docstore": docstore, "precompute": precompute}
        super().__init__(**{**kwargs, **own, **given})
        self._known = owner_of(base, _Holdings)
        self._chunks = StoreChunks(engine, self._known)

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
        return "CacheBlendVectorStore"

    @classmethod
    def within(cls, storage: StorageContext, engine: BlendEngine, precompute: bool = True) -> StorageContext:
        """Wrap the vector store of ``storage``, in place, and return ``storage``, to make or load an index with."""
        base = storage.vector_store
        if not isinstance(base, cls):
            storage.add_vector_store(cls(base, engine, storage.docstore, precompute), DEFAULT_VECTOR_STORE)
        return storage

    def estimate_existing(self, nodes: Iterable[BaseNode] | None = None) -> ExistingEstimate:
        """Return the chunks, bytes and time of :meth:`precompute_existing`, measured by computing a few nodes.

        Raises:
            InputError: Neither base nor docstore can list the nodes, and they are not given.
            StoreError: The KV store cannot be written.
        """
        existing = self._existing() if nodes is None else nodes
        return estimate_existing(self.engine, map(node_text, existing))

    def precompute_existing(
        self, nodes: Iterable[BaseNode] | None = None, progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Compute the KV of the nodes already in the base, with their metadata.

        Stored KV is skipped: call again after an interruption.

        Args:
            nodes: All nodes, if neither base nor docstore can list them.
            progress: Called with the number of nodes finished since its last call.

        Raises:
            InputError: Neither base nor docstore can list the nodes, and they are not given.
            StoreError: The KV store cannot be written. KV stored before the error stays.
        """
        return precompute_existing(self._existing() if nodes is None else nodes, self._compute, progress)

    @property
    def client(self) -> Any:
        """Return the base's client."""
        return self.base.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes to the base, then precompute their KV; return their ids.

        A node that replaces another node under its id releases the former text. If the KV store fails, a warning is
        logged, and prompts compute the missing KV.
        """
        self._learn(node.node_id for node in nodes)
        ids = self.base.add(list(nodes), **kwargs)
        self._take_in(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes asynchronously; see :meth:`add`."""
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
        """Delete a document's nodes asynchronously; see :meth:`delete`."""
        # Before the first await: LlamaIndex deletes from the docstore at the same time.
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
        """Delete nodes asynchronously; see :meth:`delete_nodes`."""
        names = self._chosen(node_ids, filters)
        await self.base.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(self._let_go, names)

    def clear(self) -> None:
        """Delete everything from the base, and the KV that no node of another store needs."""
        names = self._chosen(None, None)
        self.base.clear()
        self._let_go(names)

    async def aclear(self) -> None:
        """Delete everything asynchronously; see :meth:`clear`."""
        names = self._chosen(None, None)
        await self.base.aclear()
        await asyncio.to_thread(self._let_go, names)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return the base's nodes."""
        return self.base.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes asynchronously; see :meth:`get_nodes`."""
        return await self.base.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the base, and register the returned nodes with the engine."""
        return self._found(self.base.query(query, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query asynchronously; see :meth:`query`."""
        return await asyncio.to_thread(self._found, await self.base.aquery(query, **kwargs))

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Write the base to a file."""
        self.base.persist(persist_path, fs=fs)

    def __getattr__(self, name: str) -> Any:
        """Return the base's attribute for any name not defined here."""
        if name.startswith("_") or name in type(self).model_fields:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError if the engine cannot be pickled."""
        refuse_unpicklable(self.engine, type(self).__name__)
        return super().__getstate__()

    def _found(self, result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        self._hold(result.nodes or ())
        return result

    def _hold(self, nodes: Iterable[BaseNode]) -> None:
        """Register nodes, and record which texts they hold."""
        nodes = list(nodes)
        self._known.add(nodes)
        self._chunks.hold((node.node_id, node_forms(node)) for node in nodes)

    def _existing(self) -> Sequence[BaseNode]:
        """Return all nodes: from a base that stores their text, else from the docstore."""
        if self.base.stores_text and (found := self._asked_of_base(None, None)):
            return found
        # A pipeline's docstore holds the input documents, not their nodes; no prompt will hold a whole document.
        named = getattr(getattr(self.base, "data", None), "embedding_dict", None)  # attribute of SimpleVectorStore
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
        nodes = list({node.node_id: node for node in nodes}.values())  # the base keeps the last node of each id
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
        """Record the texts of the nodes with these ids before they change: the nodes may predate this process."""
        names = self._known.unknown(node_ids)
        if names and self.docstore is not None:
            kept = [self.docstore.get_document(name, raise_error=False) for name in names]
            self._hold(node for node in kept if node is not None)
            names = self._known.unknown(names)
        if names:
            self._hold(self._asked_of_base(names, None))

    def _nodes_of(self, ref_doc_id: str) -> set[str]:
        """Return the ids of a document's nodes, and record the nodes' texts."""
        info = None if self.docstore is None else self.docstore.get_ref_doc_info(ref_doc_id)
        self._learn(info.node_ids if info is not None else ())
        self._hold(
            self._asked_of_base(None, MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=ref_doc_id)]))
        )
        return self._known.of(ref_doc_id)

    def _chosen(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> set[str]:
        """Return the ids of the chosen nodes, and record the nodes' texts."""
        if filters is None and node_ids is not None:
            self._learn(node_ids)
            return set(node_ids)
        found = self._asked_of_base(node_ids, filters)
        self._hold(found)
        return {node.node_id for node in found} if filters is not None else self._known.every()

    def _asked_of_base(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[BaseNode]:
        # Some bases cannot list their nodes, or lack a filter.
        if not self.base.stores_text:
            return []
        with suppress(NotImplementedError, ValueError):
            try:
                return list(self.base.get_nodes(node_ids, filters))
            except AssertionError:  # Postgres requires ids or filters, and an empty list of ids for all nodes
                return list(self.base.get_nodes(node_ids or [], filters))
        return []

    def _let_go(self, node_ids: Iterable[str]) -> None:
        names = set(node_ids)
        self._known.remove(names)
        self._chunks.release(names)
