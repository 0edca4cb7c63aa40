"""Tests the arguments that the retriever passes on, and the chunks that it registers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import ValidationError

from cacheblend_rag import InputError, StoreError, chunk_id
from cacheblend_rag.frameworks import DEFAULT_EMBEDDING, Embedder
from cacheblend_rag.frameworks.uses import READER
from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, ChatCacheBlend, ChunkSplitter

from scripted import ScriptedEngine

DOCUMENTS = [Document(page_content=f"Note number {n} is about the harbour of Marlow.", id=str(n)) for n in range(6)]


def store() -> InMemoryVectorStore:
    made = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    made.add_documents(DOCUMENTS)
    return made


class Fixed(BaseRetriever):
    """Takes an extra keyword, and no k."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, only: str = ""
    ) -> list[Document]:
        return [d for d in DOCUMENTS if only in d.page_content]


class SyncK(BaseRetriever):
    """Takes k when called, and not when awaited: LangChain's default async method passes nothing on."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int
    ) -> list[Document]:
        return DOCUMENTS[:k]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return DOCUMENTS


def test_retrieved_documents_are_registered_and_read_ahead_but_not_computed(scripted: ScriptedEngine) -> None:
    found = CacheBlendRetriever(base_retriever=Fixed(), engine=scripted).invoke("x")
    assert found == DOCUMENTS
    assert {chunk.text for chunk in scripted.registry} == {d.page_content for d in DOCUMENTS}
    assert scripted.stored == set()
    READER.submit(lambda: None).result()
    assert scripted.prefetched == [chunk_id(d.page_content) for d in DOCUMENTS]


def test_prefetching_can_be_switched_off_and_its_failures_are_ignored(scripted: ScriptedEngine) -> None:
    def fail(chunk_ids: Any) -> None:
        raise StoreError("gone")

    CacheBlendRetriever(base_retriever=Fixed(), engine=scripted, prefetch=False).invoke("x")
    scripted.prefetch = fail  # type: ignore[method-assign]
    assert CacheBlendRetriever(base_retriever=Fixed(), engine=scripted).invoke("x") == DOCUMENTS
    READER.submit(lambda: None).result()


def test_arguments_reach_the_base_retriever(scripted: ScriptedEngine) -> None:
    retriever = CacheBlendRetriever(base_retriever=Fixed(), engine=scripted)
    assert retriever.invoke("x", only="number 3") == [DOCUMENTS[3]]
    filtered = CacheBlendRetriever.from_vectorstore(store(), scripted, search_kwargs={"filter": lambda d: d.id == "2"})
    assert [d.id for d in filtered.invoke("x")] == ["2"]


async def test_k_is_passed_to_a_base_that_takes_it_and_applied_to_the_results_otherwise(
    scripted: ScriptedEngine,
) -> None:
    wide = CacheBlendRetriever.from_vectorstore(store(), scripted, k=5)
    assert len(wide.invoke("x")) == 5 == len(await wide.ainvoke("x"))
    assert len(wide.invoke("x", k=6)) == 6
    for base in (Fixed(), SyncK(), RunnableLambda(lambda q: list(DOCUMENTS))):
        retriever = CacheBlendRetriever(base_retriever=base, engine=scripted, k=2)
        assert retriever.invoke("x") == DOCUMENTS[:2]
        assert retriever.invoke("x", k=3) == DOCUMENTS[:3] == await retriever.ainvoke("x", k=3)
    with pytest.raises(ValidationError):
        CacheBlendRetriever(base_retriever=Fixed(), engine=scripted, k=0)


async def test_callbacks_see_one_retrieval_and_its_nested_runs(scripted: ScriptedEngine) -> None:
    class Handler(BaseCallbackHandler):
        def __init__(self) -> None:
            self.started: list[tuple[str, Any]] = []
            self.found: list[int] = []

        def on_retriever_start(self, *args: Any, name: str, parent_run_id: Any = None, **kwargs: Any) -> None:
            self.started.append((name, parent_run_id))

        def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
            self.found.append(len(documents))

        def on_chain_start(self, *args: Any, name: str, parent_run_id: Any = None, **kwargs: Any) -> None:
            self.started.append((name, parent_run_id is None))

    class Thinking(BaseRetriever):
        """Runs another runnable first."""

        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            RunnableLambda(str.lower, name="rewriting").invoke(query, {"callbacks": run_manager.get_child()})
            return DOCUMENTS

    class Counting(Fixed):
        """Adds a document after a retrieval."""

        def invoke(self, *args: Any, **kwargs: Any) -> list[Document]:
            return [*super().invoke(*args, **kwargs), DOCUMENTS[0]]

    wrapped = CacheBlendRetriever(base_retriever=Thinking(), engine=scripted)
    for search in (wrapped.invoke, wrapped.ainvoke):
        handler = Handler()
        found = search("x", config={"callbacks": [handler]})
        assert (found if isinstance(found, list) else await found) == DOCUMENTS
        assert handler.started == [("CacheBlendRetriever", None), ("rewriting", False)]
        assert handler.found == [len(DOCUMENTS)]
    events = [e async for e in CacheBlendRetriever(base_retriever=Fixed(), engine=scripted).astream_events("x")]
    assert [e["event"] for e in events] == ["on_retriever_start", "on_retriever_end"]
    searched = [e async for e in CacheBlendRetriever.from_vectorstore(store(), scripted).astream_events("x")]
    assert {e["metadata"]["ls_vector_store_provider"] for e in searched} == {"InMemoryVectorStore"}
    assert len(CacheBlendRetriever(base_retriever=Counting(), engine=scripted).invoke("x")) == len(DOCUMENTS) + 1


def test_from_documents_computes_the_kv(scripted: ScriptedEngine) -> None:
    embedding = DeterministicFakeEmbedding(size=8)
    retriever = CacheBlendRetriever.from_documents(DOCUMENTS, scripted, embedding=embedding, k=2)
    assert scripted.stored == {chunk_id(d.page_content) for d in DOCUMENTS}
    context = "\n\n".join(d.page_content for d in retriever.invoke("x"))
    answer = ChatCacheBlend(engine=scripted).invoke(context)
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_documents_that_fit_no_prompt_are_left_out() -> None:
    engine = ScriptedEngine(window=40)
    long = Document(page_content="word " * 100)
    retriever = CacheBlendRetriever(
        base_retriever=RunnableLambda(lambda q: [long, Document(page_content=" ")]), engine=engine
    )
    assert len(retriever.invoke("x")) == 2
    assert retriever.precompute([long, DOCUMENTS[0]]).computed == 1
    assert len(engine.registry) == 1


def test_a_store_that_refuses_kv_causes_a_warning(scripted: ScriptedEngine) -> None:
    def refuse(chunks: Any, progress: Any = None) -> Any:
        raise StoreError("The disk is full.")

    scripted.precompute = refuse  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="disk is full"):
        report = CacheBlendRetriever(base_retriever=Fixed(), engine=scripted).precompute(DOCUMENTS)
    assert len(report.failed) == len(DOCUMENTS)


def test_the_engine_is_not_printed_or_serialised(scripted: ScriptedEngine) -> None:
    retriever = CacheBlendRetriever(base_retriever=Fixed(), engine=scripted)
    assert "ScriptedEngine" not in repr(retriever) + str(retriever.model_dump())


def test_the_splitter_cuts_by_the_engines_tokens_and_copies_metadata(scripted: ScriptedEngine) -> None:
    text = "The harbour of Marlow is very old. Its keeper is Ada Brenmoor. " * 12
    pieces = ChunkSplitter(scripted, max_tokens=40).transform_documents(
        [Document(page_content=text, metadata={"source": "a"})]
    )
    assert len(pieces) > 3
    for piece in pieces:
        assert len(scripted.tokenizer(piece.page_content).input_ids) <= 40
        start = piece.metadata["start_index"]
        assert piece.metadata["source"] == "a" and text[start:].startswith(piece.page_content)


def test_the_bundled_embeddings_can_be_pickled(embedding: BundledEmbeddings) -> None:
    vector = embedding.embed_query("a harbour")
    for copied in (pickle.loads(pickle.dumps(embedding)), copy.deepcopy(embedding)):
        assert copied.embed_query("a harbour") == pytest.approx(vector, abs=1e-6)
    named = ChatCacheBlend(model="bundled").engine
    retriever = CacheBlendRetriever.from_documents(DOCUMENTS[:2], named, embedding=embedding, k=1)
    sent = pickle.loads(pickle.dumps(retriever))
    assert sent.engine is named
    assert sent.invoke("number 1") == retriever.invoke("number 1")
    named.close()


def test_the_bundled_embeddings_find_the_relevant_text(embedding: BundledEmbeddings) -> None:
    texts = ["The ship's captain is Petra.", "Bread is baked at noon. " * 200]
    vectors = embedding.embed_documents(texts)
    question = embedding.embed_query("Who commands the ship?")
    near, far = (sum(a * b for a, b in zip(question, v, strict=True)) for v in vectors)
    assert near > far
    assert all(abs(sum(a * a for a in v) - 1) < 1e-5 for v in vectors)
    assert embedding.embed_documents([]) == []


@pytest.fixture(scope="session")
def query_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a sentence-transformers model like `cacheblend tune-retriever`; it reverses every question's vector."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense

    base = Embedder.load(DEFAULT_EMBEDDING).model
    size = base.get_embedding_dimension()
    turned = Dense(size, size, bias=False, activation_function=None, init_weight=-torch.eye(size))
    directory = tmp_path_factory.mktemp("query-encoder")
    SentenceTransformer(modules=[*base.children(), turned], device=str(base.device)).save_pretrained(str(directory))
    return str(directory)


def test_a_query_encoder_embeds_questions_and_no_documents(query_encoder: str) -> None:
    plain, tuned = BundledEmbeddings(), BundledEmbeddings(query_encoder=query_encoder)
    assert tuned.embed_documents(["a harbour"]) == plain.embed_documents(["a harbour"])
    assert tuned.embed_query("a harbour") == pytest.approx([-x for x in plain.embed_query("a harbour")], abs=1e-5)


def test_the_retriever_searches_with_a_query_encoder(query_encoder: str, scripted: ScriptedEngine) -> None:
    documents = [Document(page_content=text) for text in ("The harbour of Marlow.", "Bread is baked at dawn.")]
    for encoder, best in ((None, 0), (query_encoder, 1)):
        asked = CacheBlendRetriever.from_documents(documents, scripted, query_encoder=encoder, k=1)
        assert asked.invoke("Where is the harbour?")[0].page_content == documents[best].page_content
    with pytest.raises(InputError, match="BundledEmbeddings"):
        CacheBlendRetriever.from_documents(
            documents, scripted, embedding=BundledEmbeddings(), query_encoder=query_encoder
        )
