"""Tests that the vector store adds and removes KV with its documents, and only then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag import BlendEngine, InputError, PrecomputeReport, TransformersEngine, chunk_id, make_chunk
from langchain_cacheblend import CacheBlendVectorStore, ChatCacheBlend

from scripted import ScriptedEngine

TEXTS = [f"Note number {n} is about the harbour of Marlow." for n in range(6)]
EMBEDDING = DeterministicFakeEmbedding(size=8)


def documents(*numbers: int, source: str = "a") -> list[Document]:
    return [Document(page_content=TEXTS[n], metadata={"source": source, "n": n}) for n in numbers]


def stored(engine: ScriptedEngine) -> list[int]:
    return sorted(n for n, text in enumerate(TEXTS) if chunk_id(text) in engine.stored)


@pytest.fixture
def store(scripted: ScriptedEngine) -> CacheBlendVectorStore:
    return CacheBlendVectorStore(base=InMemoryVectorStore(EMBEDDING), engine=scripted)


class WithoutGetByIds(InMemoryVectorStore):
    def get_by_ids(self, ids: Any, /) -> list[Document]:
        raise NotImplementedError


async def test_added_documents_are_computed(store: CacheBlendVectorStore, scripted: ScriptedEngine) -> None:
    store.add_documents(documents(0))
    await store.aadd_documents(documents(1))
    store.add_texts([TEXTS[2]], [{"n": 2}], ids=["two"])
    await store.aadd_texts([TEXTS[3]])
    assert stored(scripted) == [0, 1, 2, 3]
    assert store.get_by_ids(["two"])[0].metadata == {"n": 2}


async def test_delete_removes_kv_that_no_other_document_uses(
    store: CacheBlendVectorStore, scripted: ScriptedEngine
) -> None:
    store.add_documents(documents(0, 1, 1), ids=["a", "b", "c"])
    store.delete(["a", "b", "unknown"])
    assert stored(scripted) == [1]
    await store.adelete(["c"])
    assert stored(scripted) == []
    assert len(scripted.registry) == 0


def test_stores_on_one_engine_share_texts(scripted: ScriptedEngine) -> None:
    base = InMemoryVectorStore(EMBEDDING)
    one, again = CacheBlendVectorStore(base, scripted), CacheBlendVectorStore(base, scripted)
    other = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), scripted)
    one.add_documents(documents(0, 1), ids=["a", "b"])
    other.add_documents(documents(1), ids=["a"])
    again.delete(["a", "b"])
    assert stored(scripted) == [1]
    other.delete(["a"])
    assert stored(scripted) == []


def test_chunks_registered_elsewhere_stay(scripted: ScriptedEngine) -> None:
    scripted.precompute([make_chunk(TEXTS[0], scripted.tokenizer)])
    store = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), scripted)
    store.add_documents(documents(0, 1), ids=["a", "b"])
    store.delete(["a", "b"])
    assert stored(scripted) == [0]


def test_kv_brought_in_by_a_prompt_is_deleted_with_its_document(
    scripted: ScriptedEngine, store: CacheBlendVectorStore
) -> None:
    block = {"type": "text", "text": TEXTS[0], "id": chunk_id(TEXTS[0])}
    ChatCacheBlend(engine=scripted).invoke([("human", [block])])
    store.add_documents(documents(0), ids=["a"])
    store.delete(["a"])
    assert stored(scripted) == []


@pytest.mark.parametrize("base", [InMemoryVectorStore, WithoutGetByIds])
def test_a_replaced_document_releases_its_former_text(scripted: ScriptedEngine, base: type[VectorStore]) -> None:
    store = CacheBlendVectorStore(base(EMBEDDING), scripted)  # type: ignore[call-arg]
    store.add_documents(documents(0, 1), ids=["a", "b"])
    store.add_documents(documents(2, 0), ids=["a", "b"])
    assert stored(scripted) == [0, 2]
    store.delete(["a"])
    assert stored(scripted) == [0]
    store.add_documents([Document(page_content=" ")], ids=["b"])
    assert stored(scripted) == []


def test_the_later_of_two_documents_with_equal_ids_is_stored(engine: TransformersEngine) -> None:
    def kept() -> list[bool]:
        assert engine.entries is not None
        return [engine.entries.contains(make_chunk(text, engine.tokenizer).token_ids) for text in TEXTS[:2]]

    store = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), engine)
    store.add_documents(documents(0, 1), ids=["a", "a"])
    assert kept() == [False, True]
    store.delete(["a"])
    assert kept() == [False, False]


def test_a_base_filled_earlier_is_registered_as_it_is_used(scripted: ScriptedEngine) -> None:
    base = InMemoryVectorStore(EMBEDDING)
    base.add_documents(documents(0, 1, 1), ids=["a", "b", "c"])
    store = CacheBlendVectorStore(base, scripted)
    scripted.precompute([make_chunk(text, scripted.tokenizer) for text in TEXTS[3:4]])
    assert len(store.similarity_search("x", k=3)) == 3
    assert {chunk.text for chunk in scripted.registry} >= {TEXTS[0], TEXTS[1]}
    scripted.stored |= {chunk_id(TEXTS[0]), chunk_id(TEXTS[1])}
    store.delete(["a", "b"])
    assert stored(scripted) == [1, 3]


def test_kv_of_an_earlier_process_is_deleted_with_its_document(scripted: ScriptedEngine) -> None:
    base = InMemoryVectorStore(EMBEDDING)
    base.add_documents(documents(0, 1), ids=["a", "b"])
    scripted.stored |= {chunk_id(TEXTS[0]), chunk_id(TEXTS[1])}
    store = CacheBlendVectorStore(base, scripted)
    store.delete(["a"])
    store.add_documents(documents(2), ids=["b"])
    assert stored(scripted) == [2]


def test_deleting_without_ids_removes_the_kv_of_all_deleted_documents(scripted: ScriptedEngine) -> None:
    class Clearing(InMemoryVectorStore):
        def delete(self, ids: Any = None, **kwargs: Any) -> None:
            super().delete(list(self.store) if ids is None else ids)

    store = CacheBlendVectorStore(Clearing(EMBEDDING), scripted)
    store.add_documents(documents(0, 1))
    store.delete(delete_all=True)
    assert stored(scripted) == []


def test_a_refused_delete_leaves_the_kv(scripted: ScriptedEngine) -> None:
    class Refusing(InMemoryVectorStore):
        def delete(self, ids: Any = None, **kwargs: Any) -> bool:  # type: ignore[override]
            return False

    store = CacheBlendVectorStore(Refusing(EMBEDDING), scripted)
    store.add_documents(documents(0), ids=["a"])
    assert store.delete(["a"]) is False
    assert stored(scripted) == [0]


async def test_searches_and_filters_are_passed_to_the_base(store: CacheBlendVectorStore) -> None:
    base = store.base
    store.add_documents(documents(*range(6)))
    vector = EMBEDDING.embed_query("x")
    only = {"filter": lambda d: d.metadata["n"] > 2}
    for name, *arguments in (
        ("similarity_search", "x"),
        ("similarity_search_with_score", "x"),
        ("similarity_search_by_vector", vector),
        ("max_marginal_relevance_search", "x"),
        ("max_marginal_relevance_search_by_vector", vector),
        ("search", "x", "similarity"),
    ):
        want = getattr(base, name)(*arguments, k=3)
        assert getattr(store, name)(*arguments, k=3) == want
        assert await getattr(store, f"a{name}")(*arguments, k=3) == want
    assert len(store.similarity_search("x", k=6, **only)) == 3
    retriever = store.as_retriever(search_kwargs={"k": 2, **only})
    assert retriever.invoke("x") == base.similarity_search("x", k=2, **only) == await retriever.ainvoke("x")
    assert store.embeddings is base.embeddings
    assert store.dump.__self__ is base
    with pytest.raises(AttributeError):
        store.no_such_thing  # noqa: B018


def test_from_texts_takes_an_engine_and_a_base(scripted: ScriptedEngine) -> None:
    base = InMemoryVectorStore(EMBEDDING)
    store = CacheBlendVectorStore.from_texts(TEXTS[:2], EMBEDDING, engine=scripted, base=base, ids=["a", "b"])
    assert store.base is base and stored(scripted) == [0, 1]
    more = CacheBlendVectorStore.from_documents(documents(2), EMBEDDING, engine=scripted)
    assert len(more.similarity_search("x")) == 1 and stored(scripted) == [0, 1, 2]
    with pytest.raises(InputError, match="engine="):
        CacheBlendVectorStore.from_texts(TEXTS, EMBEDDING)


async def test_index_computes_new_documents_skips_known_ones_and_deletes_old_ones(scripted: ScriptedEngine) -> None:
    for run in ("sync", "async"):
        engine = ScriptedEngine()
        store = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), engine)
        manager = InMemoryRecordManager(run)
        manager.create_schema()

        async def update(*numbers: int, kind: str = run, manager: Any = manager, store: Any = store) -> tuple[int, ...]:
            options = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
            docs = documents(*numbers)
            result = (
                index(docs, manager, store, **options)
                if kind == "sync"
                else await aindex(docs, manager, store, **options)
            )
            return result["num_added"], result["num_skipped"], result["num_deleted"]

        assert await update(0, 1, 2) == (3, 0, 0)
        assert stored(engine) == [0, 1, 2]
        assert await update(1, 2, 3) == (1, 2, 1)
        assert stored(engine) == [1, 2, 3]


def test_refused_kv_does_not_stop_indexing(scripted: ScriptedEngine) -> None:
    scripted.precompute = lambda chunks, progress=None: PrecomputeReport(failed={c.id: "no room" for c in chunks})  # type: ignore
    store = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), scripted)
    with pytest.warns(UserWarning, match="no room"):
        assert len(store.add_documents(documents(0, 1))) == 2
    assert len(store.similarity_search("x")) == 2


def test_the_transformers_engine_forgets_and_computes_again(engine: TransformersEngine) -> None:
    store = CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), engine)
    text = "A note of its own: the lighthouse of Marlow burns at night."
    entries = engine.store.stats().entries
    store.add_texts([text], ids=["a"])
    assert engine.store.stats().entries > entries
    llm = ChatCacheBlend(engine=engine, max_tokens=4, ratio=1.0)  # at this ratio a blend answers as a prefill
    before = llm.invoke(f"{text}\n\nQuestion: When does it burn?")
    assert before.response_metadata["cacheblend"]["mode"] == "blend"
    store.delete(["a"])
    assert engine.store.stats().entries <= entries + 1  # the header's entry belongs to no chunk
    after = llm.invoke(f"{text}\n\nQuestion: When does it burn?")
    assert (after.response_metadata["cacheblend"]["mode"], after.content) == ("prefill", before.content)


class Lives(RuleBasedStateMachine):
    """Runs two stores on one engine: at any time exactly the texts of existing documents have KV."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = ScriptedEngine()
        self.stores = [CacheBlendVectorStore(InMemoryVectorStore(EMBEDDING), self.engine) for _ in range(2)]
        self.texts: list[dict[str, int]] = [{}, {}]

    @rule(at=st.integers(0, 1), items=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5), min_size=1))
    def add(self, at: int, items: dict[str, int]) -> None:
        self.stores[at].add_documents(documents(*items.values()), ids=list(items))
        self.texts[at].update(items)

    @rule(at=st.integers(0, 1), names=st.lists(st.sampled_from("abcd"), min_size=1))
    def delete(self, at: int, names: list[str]) -> None:
        self.stores[at].delete(names)
        for name in names:
            self.texts[at].pop(name, None)

    @rule(at=st.integers(0, 1))
    def search(self, at: int) -> None:
        self.stores[at].similarity_search("x", k=random.Random(0).randint(1, 6))

    @invariant()
    def kv_is_that_of_the_documents(self) -> None:
        assert stored(self.engine) == sorted({n for held in self.texts for n in held.values()})


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def test_stores_of_two_tenants_on_one_engine_share_no_chunks_and_no_kv(engine: BlendEngine) -> None:
    acme, globex = (engine.within(name) for name in ("acme", "globex"))
    mine = CacheBlendVectorStore(base=InMemoryVectorStore(EMBEDDING), engine=acme)
    mine.add_documents(documents(0, 1))
    modes = [
        ChatCacheBlend(engine=each, max_tokens=2).invoke(f"{TEXTS[0]} Where?").response_metadata["cacheblend"]["mode"]
        for each in (acme, globex)
    ]
    assert modes == ["blend", "prefill"]
    theirs = CacheBlendVectorStore(base=InMemoryVectorStore(EMBEDDING), engine=globex)
    theirs.add_documents(documents(0), ids=["a"])
    theirs.delete(["a"])
    assert len(globex.registry) == 0
    assert {chunk.text for chunk in acme.registry} == {TEXTS[0], TEXTS[1]}
