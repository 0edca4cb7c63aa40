"""Tests that deleting and replacing documents deletes the KV of unused texts, in every way that LlamaIndex offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult

from cacheblend_rag import BlendEngine, Chunk, InputError, TransformersEngine, make_chunk
from cacheblend_rag.frameworks import uses
from llama_index_cacheblend import BundledEmbedding, CacheBlendLLM, CacheBlendVectorStore, node_text

OLD = "The lighthouse of Marlow was painted red in 1911, by order of the harbour master and at his own expense."
NEW = "The lighthouse of Marlow was painted white in 1923, by order of the council, which never paid the painter."
OTHER = "The customs house of Oakcliff has been empty since the ferries stopped calling there in the summer of 1954."


@pytest.fixture
def own() -> Iterator[TransformersEngine]:
    with TransformersEngine(device="cpu") as engine:
        yield engine


def document(text: str, name: str) -> Document:
    return Document(text=text, id_=name, metadata={"source": "chronicle"})


def stored(engine: BlendEngine, text: str) -> bool:
    """Return whether KV of a text is stored, with the metadata of these documents or without."""
    assert engine.entries is not None
    forms = (text, f"source: chronicle\n\n{text}")
    return any(engine.entries.contains(make_chunk(form, engine.tokenizer).token_ids) for form in forms)


def reused(engine: BlendEngine, text: str) -> int:
    raw = CacheBlendLLM(engine=engine, max_tokens=1, ratio=0.0).complete(f"Notes:\nsource: chronicle\n\n{text}\n").raw
    return int(raw["usage"]["reused_tokens"])


def index_of(engine: BlendEngine, embedding: BundledEmbedding, *documents: Document) -> VectorStoreIndex:
    storage = CacheBlendVectorStore.within(StorageContext.from_defaults(), engine)
    return VectorStoreIndex.from_documents(list(documents), storage_context=storage, embed_model=embedding)


def test_added_documents_are_computed_and_found(own: TransformersEngine, embedding: BundledEmbedding) -> None:
    index = index_of(own, embedding, document(OLD, "a"), document(OTHER, "b"))
    assert stored(own, OLD)
    assert stored(own, OTHER)
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("Who had the lighthouse painted red?")
    assert found.node.get_content() == OLD
    assert reused(own, OLD) > 15


@pytest.mark.parametrize("way", ["delete_ref_doc", "delete_nodes", "refresh_ref_docs", "update_ref_doc"])
def test_deletion_and_replacement_leave_no_kv_of_the_text(
    own: TransformersEngine, embedding: BundledEmbedding, way: str
) -> None:
    index = index_of(own, embedding, document(OLD, "a"), document(OTHER, "b"))
    if way == "delete_ref_doc":
        index.delete_ref_doc("a", delete_from_docstore=True)
    elif way == "delete_nodes":
        index.delete_nodes(index.docstore.get_ref_doc_info("a").node_ids, delete_from_docstore=True)
    elif way == "refresh_ref_docs":
        assert index.refresh_ref_docs([document(NEW, "a"), document(OTHER, "b")]) == [True, False]
    else:
        index.update_ref_doc(document(NEW, "a"))
    assert (stored(own, OLD), stored(own, OTHER)) == (False, True)
    assert stored(own, NEW) == (way in ("refresh_ref_docs", "update_ref_doc"))
    assert reused(own, OLD) == 0
    own.flush()


async def test_async_deletion_and_replacement_leave_no_kv_of_the_text(
    own: TransformersEngine, embedding: BundledEmbedding
) -> None:
    index = index_of(own, embedding, document(OLD, "a"), document(OTHER, "b"))
    await index.adelete_ref_doc("a", delete_from_docstore=True)
    assert (stored(own, OLD), stored(own, OTHER)) == (False, True)
    await index.arefresh_ref_docs([document(NEW, "b")])
    assert (stored(own, NEW), stored(own, OTHER)) == (True, False)


@pytest.mark.parametrize("strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE])
def test_a_pipelines_upserts_leave_no_kv_of_the_former_text(
    own: TransformersEngine, embedding: BundledEmbedding, strategy: DocstoreStrategy
) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0), embedding],
        vector_store=CacheBlendVectorStore(engine=own),
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
    )
    pipeline.run(documents=[document(OLD, "a"), document(OTHER, "b")])
    assert stored(own, OLD)
    pipeline.run(documents=[document(NEW, "a")])
    assert (stored(own, OLD), stored(own, NEW)) == (False, True)
    assert stored(own, OTHER) == (strategy is DocstoreStrategy.UPSERTS)
    assert reused(own, OLD) == 0


def test_a_text_has_kv_as_long_as_one_document_contains_it(
    own: TransformersEngine, embedding: BundledEmbedding
) -> None:
    first = index_of(own, embedding, document(OLD, "a"), document(OLD, "b"))
    second = index_of(own, embedding, document(OLD, "c"))
    for index, name in ((first, "a"), (first, "b")):
        index.delete_ref_doc(name, delete_from_docstore=True)
        assert stored(own, OLD)
    second.delete_ref_doc("c", delete_from_docstore=True)
    assert not stored(own, OLD)


def test_an_index_of_an_earlier_process_is_known_by_its_docstore(embedding: BundledEmbedding, tmp_path: Path) -> None:
    with TransformersEngine(device="cpu", store=tmp_path / "kv") as engine:
        index_of(engine, embedding, document(OLD, "a"), document(OTHER, "b")).storage_context.persist(
            tmp_path / "index"
        )
    with TransformersEngine(device="cpu", store=tmp_path / "kv") as engine:
        assert stored(engine, OLD)
        storage = CacheBlendVectorStore.within(
            StorageContext.from_defaults(persist_dir=str(tmp_path / "index")), engine
        )
        index = load_index_from_storage(storage, embed_model=embedding)
        index.delete_ref_doc("a", delete_from_docstore=True)
        assert (stored(engine, OLD), stored(engine, OTHER)) == (False, True)


class TextStore(SimpleVectorStore):
    """A base that stores texts, as most do, and lists its nodes."""

    stores_text: bool = True

    def _nodes(self) -> dict[str, BaseNode]:
        return self.__dict__.setdefault("kept", {})  # type: ignore[no-any-return]

    def add(self, nodes: Any, **kwargs: Any) -> list[str]:
        self._nodes().update({node.node_id: node for node in nodes})
        return super().add(nodes, **kwargs)

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        wanted = None if filters is None else filters.filters[0].value
        every = [n for n in self._nodes().values() if wanted in (None, n.ref_doc_id)]
        return [n for n in every if node_ids is None or n.node_id in node_ids]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        found = super().query(query, **kwargs)
        return VectorStoreQueryResult([self._nodes()[n] for n in found.ids or ()], found.similarities, found.ids)


def test_a_base_that_stores_texts_is_asked_for_its_nodes(embedding: BundledEmbedding, tmp_path: Path) -> None:
    base = TextStore()
    with TransformersEngine(device="cpu", store=tmp_path) as engine:
        VectorStoreIndex.from_documents(
            [document(OLD, "a"), document(OTHER, "b")],
            storage_context=StorageContext.from_defaults(vector_store=CacheBlendVectorStore(base, engine)),
            embed_model=embedding,
        )
    uses._owners.clear()  # as in a new process
    with TransformersEngine(device="cpu", store=tmp_path) as engine:
        assert stored(engine, OLD)
        index = VectorStoreIndex.from_vector_store(CacheBlendVectorStore(base, engine), embed_model=embedding)
        index.delete_ref_doc("a")
        assert (stored(engine, OLD), stored(engine, OTHER)) == (False, True)


def test_a_replaced_node_releases_its_text(own: TransformersEngine) -> None:
    def node(text: str) -> TextNode:
        made = TextNode(text=text, id_="n", embedding=[1.0, 0.0])
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="a")
        return made

    store = CacheBlendVectorStore(engine=own)
    store.add([node(OLD)])
    store.add([node(NEW)])
    assert (stored(own, OLD), stored(own, NEW)) == (False, True)
    store.clear()
    assert not stored(own, NEW)


def test_the_later_of_two_nodes_with_equal_ids_is_stored(own: TransformersEngine) -> None:
    store = CacheBlendVectorStore(SimpleVectorStore(), own)
    nodes = [TextNode(text=text, id_="n", embedding=[1.0]) for text in (OLD, NEW)]
    store.add(nodes)
    assert [stored(own, text) for text in (OLD, NEW)] == [False, True]


def test_chunks_registered_elsewhere_stay(own: TransformersEngine) -> None:
    chunk: Chunk = make_chunk(OLD, own.tokenizer)
    own.precompute([chunk])
    store = CacheBlendVectorStore(engine=own)
    node = TextNode(text=OLD, embedding=[1.0, 0.0])
    store.add([node])
    store.delete_nodes([node.node_id])
    assert stored(own, OLD)
    assert node_text(node) == OLD


def test_a_vector_store_needs_an_engine() -> None:
    with pytest.raises(InputError, match="needs an engine"):
        CacheBlendVectorStore()
