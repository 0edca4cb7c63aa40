"""Tests retriever, postprocessor, transform and embedding against LlamaIndex's, and their additions."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, MetadataMode, QueryBundle, TextNode
from scripted import ScriptedEngine

from cacheblend_rag import BlendEngine, InputError, TransformersEngine, bundled_questions
from cacheblend_rag.frameworks import DEFAULT_EMBEDDING, Embedder
from llama_index_cacheblend import (
    BundledEmbedding,
    CacheBlendLLM,
    CacheBlendPostprocessor,
    CacheBlendPrecompute,
    CacheBlendRetriever,
    node_text,
)

QUESTION, FOLLOW_UP = (question.question for question in bundled_questions()[:2])


@pytest.fixture
def scripted(engine: TransformersEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


class RetrieverContract:
    """The contract of every retriever; LlamaIndex's retriever passes it, too."""

    @pytest.fixture
    def retriever(self, index: VectorStoreIndex) -> BaseRetriever:
        return index.as_retriever(similarity_top_k=3)

    def test_a_retriever_returns_scored_nodes_best_first(self, retriever: BaseRetriever) -> None:
        found = retriever.retrieve(QUESTION)
        assert len(found) == 3
        scores = [node.score for node in found]
        assert scores == sorted(scores, reverse=True)

    async def test_strings_bundles_and_async_agree(self, retriever: BaseRetriever) -> None:
        want = [node.node_id for node in retriever.retrieve(QUESTION)]
        assert [node.node_id for node in retriever.retrieve(QueryBundle(QUESTION))] == want
        assert [node.node_id for node in await retriever.aretrieve(QUESTION)] == want
        many = await asyncio.gather(*(retriever.aretrieve(QUESTION) for _ in range(3)))
        assert [[node.node_id for node in found] for found in many] == [want] * 3

    def test_callbacks_see_the_retrieval(self, retriever: BaseRetriever) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        retriever.callback_manager = CallbackManager([debug])
        retriever.retrieve(QUESTION)
        assert debug.get_event_pairs(CBEventType.RETRIEVE)

    def test_a_retriever_works_in_a_query_engine(self, retriever: BaseRetriever) -> None:
        response = RetrieverQueryEngine.from_args(retriever, llm=MockLLM()).query(QUESTION)
        assert len(response.source_nodes) == 3


class TestLlamaIndexRetriever(RetrieverContract):
    pass


class TestCacheBlendRetriever(RetrieverContract):
    @pytest.fixture
    def retriever(self, index: VectorStoreIndex, scripted: ScriptedEngine) -> BaseRetriever:
        return CacheBlendRetriever(index.as_retriever(similarity_top_k=3), scripted)

    async def test_retrieved_nodes_are_registered_and_read_ahead(
        self, retriever: CacheBlendRetriever, scripted: ScriptedEngine
    ) -> None:
        from cacheblend_rag.frameworks.uses import READER

        found = retriever.retrieve(QUESTION)
        assert {chunk.text for chunk in scripted.registry} == {node_text(node) for node in found}
        READER.submit(lambda: None).result()
        assert set(scripted.prefetched) == {chunk.id for chunk in scripted.registry}
        scripted.registry.remove([chunk.id for chunk in scripted.registry])
        await retriever.aretrieve(QUESTION)
        assert len(scripted.registry) == 3

    def test_a_retriever_without_an_engine_uses_that_of_the_settings_if_any(
        self, index: VectorStoreIndex, scripted: ScriptedEngine
    ) -> None:
        retriever = CacheBlendRetriever(index.as_retriever(similarity_top_k=2))
        Settings.llm = MockLLM()
        assert len(retriever.retrieve(QUESTION)) == 2
        Settings.llm = CacheBlendLLM(engine=scripted, watch_retrieval=False)
        retriever.retrieve(QUESTION)
        assert len(scripted.registry) == 2


async def test_the_postprocessor_registers_nodes_and_returns_them_unchanged(
    scripted: ScriptedEngine, index: VectorStoreIndex
) -> None:
    found = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
    assert CacheBlendPostprocessor(scripted).postprocess_nodes(found) == found
    assert len(scripted.registry) == 2
    Settings.llm = CacheBlendLLM(engine=scripted, watch_retrieval=False)
    assert await CacheBlendPostprocessor().apostprocess_nodes(found, query_str=QUESTION) == found
    Settings.llm = MockLLM()
    assert CacheBlendPostprocessor().postprocess_nodes(found) == found


class TestPrecompute:
    def test_nodes_pass_unchanged_and_their_kv_is_in_the_store(self, engine: TransformersEngine) -> None:
        nodes = [TextNode(text="The bell of Oakcliff was cast in 1822 by two brothers.", metadata={"page": 4})]
        transform = CacheBlendPrecompute(engine)
        before = [node.model_dump() for node in nodes]
        assert transform(nodes) is nodes
        assert [node.model_dump() for node in nodes] == before
        assert (transform.report.computed, transform.report.failed) == (1, {})
        text = nodes[0].get_content(MetadataMode.LLM)
        raw = (
            CacheBlendLLM(engine=engine, max_tokens=1).chat([ChatMessage(role="user", content=f"Notes:\n{text}\n")]).raw
        )
        assert raw["reason"] == "stored KV for 1 of 1 chunks"

    async def test_a_pipeline_runs_the_transform_and_a_cached_run_skips_it(self, scripted: ScriptedEngine) -> None:
        def pipeline(engine: Any) -> IngestionPipeline:
            split = SentenceSplitter(chunk_size=64, chunk_overlap=0)
            return IngestionPipeline(transformations=[split, CacheBlendPrecompute(engine)], cache=cache)

        cache = IngestionCache()
        documents = [Document(text="Wind north-west, sea calm at dawn. " * 30, id_="log")]
        nodes = pipeline(scripted).run(documents=documents)
        computed = [chunk.text for chunk in scripted.computed]
        assert computed == [node_text(node) for node in nodes]
        again = ScriptedEngine(scripted.tokenizer)
        assert len(pipeline(again).run(documents=documents)) == len(nodes)
        assert again.computed == []  # the first prompt computes missing chunks
        another = ScriptedEngine(scripted.tokenizer)
        another.header_ids = (1, 2, 3)
        await pipeline(another).arun(documents=documents)
        assert len(another.computed) == len(nodes)

    def test_a_model_is_not_sent_to_worker_processes(self, engine: TransformersEngine) -> None:
        with pytest.raises(InputError, match="num_workers=1"):
            pickle.dumps(CacheBlendPrecompute(engine))

    def test_nodes_that_cannot_be_stored_are_logged(
        self, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        scripted.failures = {"abc": "it does not fit the store's budget"}
        nodes = [TextNode(text="A text of some length for the store.")]
        CacheBlendPrecompute(scripted)(nodes)
        assert "does not fit" in caplog.text
        with pytest.raises(RuntimeError, match="does not fit"):
            CacheBlendPrecompute(scripted, strict=True)(nodes)

    def test_nodes_longer_than_the_window_are_not_computed(self, engine: TransformersEngine) -> None:
        small = ScriptedEngine(engine.tokenizer, window=30)
        nodes = [TextNode(text="word " * 50), TextNode(text="A short one, this is.")]
        transform = CacheBlendPrecompute(small)
        transform(nodes)
        assert [chunk.text for chunk in small.computed] == ["A short one, this is."]
        (why,) = transform.report.failed.values()
        assert "context window" in why


def test_embeddings_are_unit_vectors_that_find_the_relevant_node(
    embedding: BundledEmbedding, nodes: list[BaseNode], index: VectorStoreIndex
) -> None:
    one, two = embedding.get_text_embedding_batch(["The ship sails.", "word " * 600])
    assert sum(x * x for x in one) == pytest.approx(1.0, abs=1e-4) == sum(x * x for x in two)
    (best,) = index.as_retriever(similarity_top_k=1).retrieve(node_text(nodes[5]))
    assert best.node_id == nodes[5].node_id


def test_a_query_encoder_embeds_questions_and_no_nodes(embedding: BundledEmbedding, tmp_path: Path) -> None:
    """Use an encoder like that of `cacheblend tune-retriever`; it reverses every question's vector."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense

    base = Embedder.load(DEFAULT_EMBEDDING, "cpu").model
    size = base.get_embedding_dimension()
    turned = Dense(size, size, bias=False, activation_function=None, init_weight=-torch.eye(size))
    SentenceTransformer(modules=[*base.children(), turned], device="cpu").save_pretrained(str(tmp_path))
    tuned = BundledEmbedding(device="cpu", query_encoder=tmp_path)
    assert tuned.get_text_embedding("a harbour") == embedding.get_text_embedding("a harbour")
    want = [-x for x in embedding.get_query_embedding("a harbour")]
    assert tuned.get_query_embedding("a harbour") == pytest.approx(want, abs=1e-5)


def test_kv_computed_for_a_tenant_is_blended_for_that_tenant_alone(engine: BlendEngine) -> None:
    acme, globex = (engine.within(name) for name in ("acme", "globex"))
    nodes: list[BaseNode] = [TextNode(text=f"Note number {n} is about the harbour of Marlow.") for n in range(3)]
    CacheBlendPrecompute(acme)(nodes)
    prompt = "\n\n".join(map(node_text, nodes))
    modes = [CacheBlendLLM(engine=each, max_tokens=2).complete(prompt).raw["mode"] for each in (acme, globex, engine)]
    assert modes == ["blend", "prefill", "prefill"]
