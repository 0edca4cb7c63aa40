"""Tests synthesizer, query engine and chat engine against LlamaIndex's, and their additions."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import TextNode
from pydantic import BaseModel
from scripted import ScriptedEngine

from cacheblend_rag import InputError, TransformersEngine, bundled_questions
from llama_index_cacheblend import (
    BundledEmbedding,
    CacheBlendChatEngine,
    CacheBlendLLM,
    CacheBlendQueryEngine,
    CacheBlendSynthesizer,
    collect_usage,
    node_text,
    qa_template,
    use_engine,
)

QUESTION, FOLLOW_UP = (question.question for question in bundled_questions()[:2])
MODES = ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize"]


@pytest.fixture
def scripted(engine: TransformersEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


class TestSynthesizer:
    @pytest.mark.parametrize("mode", MODES)
    async def test_our_synthesizer_answers_like_llama_indexs(
        self, mode: str, engine: TransformersEngine, index: VectorStoreIndex
    ) -> None:
        llm = CacheBlendLLM(engine=engine, max_tokens=6, ratio=1.0)
        found = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        template = {"text_qa_template": qa_template(), "summary_template": qa_template()}
        want = get_response_synthesizer(llm=llm, response_mode=mode, **template).synthesize(QUESTION, found)
        ours = CacheBlendSynthesizer(engine, llm=llm, response_mode=mode)
        engine.reset_prefix_cache()  # it has the prompts of LlamaIndex's
        got = ours.synthesize(QUESTION, found)
        assert (str(got), got.source_nodes) == (str(want), want.source_nodes)
        assert str(await ours.asynthesize(QUESTION, found)) == str(want)
        calls = got.metadata["cacheblend"]
        assert calls and all(call["mode"] == "blend" for call in calls)

    def test_exactly_the_chunks_of_the_nodes_are_found(self, scripted: ScriptedEngine) -> None:
        """Register a chunk that spans two nodes: it must not take their place."""
        one, two = "The first node, of some length.", "The second node, of some length."
        from cacheblend_rag import make_chunk

        scripted.registry.add([make_chunk(f"{one}\n\n{two}", scripted.tokenizer)])
        nodes = [{"node": TextNode(text=text)} for text in (one, two)]
        from llama_index.core.schema import NodeWithScore

        CacheBlendSynthesizer(scripted).synthesize("Which?", [NodeWithScore(**node) for node in nodes])
        assert scripted.chunks_asked() == [one, two]

    async def test_streams_arrive_in_pieces_and_their_usage_at_the_end(
        self, engine: TransformersEngine, index: VectorStoreIndex
    ) -> None:
        found = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        synthesizer = CacheBlendSynthesizer(llm=CacheBlendLLM(engine=engine, max_tokens=6), streaming=True)
        response = synthesizer.synthesize(QUESTION, found)
        assert response.metadata["cacheblend"] == []
        pieces = list(response.response_gen)
        assert len(pieces) > 1
        assert response.metadata["cacheblend"][0]["usage"]["completion_tokens"] > 0
        async_response = await synthesizer.asynthesize(QUESTION, found)
        assert "".join([piece async for piece in async_response.async_response_gen()]) == "".join(pieces)

    def test_prompts_can_be_read_and_changed(self, scripted: ScriptedEngine, index: VectorStoreIndex) -> None:
        query_engine = CacheBlendQueryEngine.from_index(index, engine=scripted)
        key = "response_synthesizer:text_qa_template"
        assert key in query_engine.get_prompts()
        query_engine.update_prompts({key: PromptTemplate("Now: {context_str} -- {query_str}")})
        query_engine.query(QUESTION)
        assert scripted.text_asked().startswith("<bos>Now: ")

    def test_an_empty_list_of_nodes_makes_no_call(self, scripted: ScriptedEngine) -> None:
        assert str(CacheBlendSynthesizer(scripted).synthesize(QUESTION, [])) == "Empty Response"
        assert scripted.asked == []

    def test_objects_are_synthesized_with_guided_decoding(
        self, scripted: ScriptedEngine, index: VectorStoreIndex
    ) -> None:
        class Place(BaseModel):
            name: str

        scripted.answer = '{"name": "Oakcliff"}'
        found = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
        synthesizer = CacheBlendSynthesizer(scripted, response_mode="tree_summarize", output_cls=Place)
        assert synthesizer.synthesize(QUESTION, found).response == Place(name="Oakcliff")
        assert scripted.asked[-1].sampling.json_schema is not None

    def test_engine_and_llm_must_agree_and_at_least_one_is_needed(self, scripted: ScriptedEngine) -> None:
        with pytest.raises(InputError, match="another engine"):
            CacheBlendSynthesizer(scripted, llm=CacheBlendLLM(engine=ScriptedEngine(scripted.tokenizer)))
        Settings.llm = MockLLM()
        with pytest.raises(InputError, match="needs an engine"):
            CacheBlendSynthesizer()
        Settings.llm = CacheBlendLLM(engine=scripted)
        assert CacheBlendSynthesizer(response_mode=ResponseMode.REFINE).engine is scripted


class TestEngines:
    def test_from_documents_splits_precomputes_and_answers(
        self, engine: TransformersEngine, documents: list[Document], embedding: BundledEmbedding
    ) -> None:
        llm = CacheBlendLLM(engine=engine, max_tokens=8, stop=["\n"])
        short = Document(text=documents[0].text[:3000], metadata=documents[0].metadata)
        made = CacheBlendQueryEngine.from_documents(
            [short], engine=engine, llm=llm, embed_model=embedding, chunk_size=128, similarity_top_k=4
        )
        response = made.query(QUESTION)
        (call,) = response.metadata["cacheblend"]
        assert call["reason"] == "stored KV for 4 of 4 chunks"
        assert all(len(llm.tokenizer(node_text(node))) <= 128 for node in response.source_nodes)
        assert {node.metadata["file_name"] for node in response.source_nodes} == {documents[0].metadata["file_name"]}

    def test_the_second_question_is_fast_without_precompute(
        self, engine: TransformersEngine, embedding: BundledEmbedding
    ) -> None:
        note = Document(text="Ilva Tornbeck keeps the keys of the old mill, and nobody else does.")
        made = CacheBlendQueryEngine.from_documents(
            [note], engine=engine, embed_model=embedding, precompute=False, max_tokens=4
        )
        first, second = (made.query("Who keeps the keys?").metadata["cacheblend"][0] for _ in range(2))
        assert [["kv" in chunk["lacks"] for chunk in each["chunks"]] for each in (first, second)] == [[True], [False]]
        assert second["usage"]["reused_tokens"] > 0

    def test_indexing_nothing_is_an_error(self, scripted: ScriptedEngine) -> None:
        with pytest.raises(InputError, match="nothing to index"):
            CacheBlendQueryEngine.from_documents([], engine=scripted, embed_model=None)

    def test_filters_and_postprocessors_are_passed_on(self, scripted: ScriptedEngine, index: VectorStoreIndex) -> None:
        from llama_index.core.postprocessor import SimilarityPostprocessor
        from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

        name = next(iter(index.docstore.docs.values())).metadata["file_name"]
        made = CacheBlendQueryEngine.from_index(
            index,
            engine=scripted,
            similarity_top_k=5,
            retriever_kwargs={"filters": MetadataFilters(filters=[MetadataFilter(key="file_name", value=name)])},
            node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=-1.0)],
        )
        assert {node.metadata["file_name"] for node in made.query(QUESTION).source_nodes} == {name}

    async def test_the_query_engine_is_asynchronous_throughout(
        self, engine: TransformersEngine, index: VectorStoreIndex
    ) -> None:
        made = CacheBlendQueryEngine.from_index(index, llm=CacheBlendLLM(engine=engine, max_tokens=4))
        want = str(made.query(QUESTION))
        assert [str(r) for r in await asyncio.gather(*(made.aquery(QUESTION) for _ in range(3)))] == [want] * 3

    async def test_the_chat_engine_remembers_and_reuses_chunks(
        self, engine: TransformersEngine, index: VectorStoreIndex
    ) -> None:
        llm = CacheBlendLLM(engine=engine, max_tokens=8)
        chat = CacheBlendChatEngine.from_index(index, llm=llm, similarity_top_k=3)
        with collect_usage() as calls:
            first = chat.chat(QUESTION)
            second = await chat.achat(FOLLOW_UP)
        assert (len(first.source_nodes), len(second.source_nodes)) == (3, 3)
        assert len(chat.chat_history) == 4
        answers = [calls[0], calls[-1]]
        assert all("3 of 3 chunks" in call.reason for call in answers)
        # The system message begins as the default header does: the first chunk is reused exactly.
        assert calls[0].usage["recomputed_tokens"] < 0.15 * calls[0].usage["reused_tokens"]

    def test_the_chat_engine_streams(self, engine: TransformersEngine, index: VectorStoreIndex) -> None:
        llm = CacheBlendLLM(engine=engine, max_tokens=8)
        make = lambda: CacheBlendChatEngine.from_index(index, llm=llm, similarity_top_k=3, skip_condense=True)  # noqa: E731
        assert "".join(make().stream_chat(QUESTION).response_gen) == str(make().chat(QUESTION))

    def test_the_chat_engine_divides_long_context_between_chunks(
        self, scripted: ScriptedEngine, index: VectorStoreIndex
    ) -> None:
        scripted.context_window = 1150
        chat = CacheBlendChatEngine.from_index(index, engine=scripted, similarity_top_k=6)
        chat.chat(QUESTION)
        found = [span.chunk for request in scripted.asked for span in request.prompt.spans]
        assert len(scripted.asked) > 1
        assert len(found) == 6

    def test_options_of_the_llm_override_defaults(self, scripted: ScriptedEngine, index: VectorStoreIndex) -> None:
        def asked(made: CacheBlendQueryEngine | CacheBlendChatEngine) -> tuple[int, float | str | None]:
            made.query(QUESTION) if isinstance(made, CacheBlendQueryEngine) else made.chat(QUESTION)
            return scripted.asked[-1].sampling.max_tokens, scripted.asked[-1].settings.ratio

        use_engine(scripted, max_tokens=20, ratio=0.5)
        for kind in (CacheBlendQueryEngine, CacheBlendChatEngine):
            assert asked(kind.from_index(index, engine=scripted)) == (20, 0.5)
            assert asked(kind.from_index(index)) == (20, 0.5)
            assert asked(kind.from_index(index, engine=scripted, max_tokens=16)) == (16, 0.5)
            other = CacheBlendLLM(engine=scripted, max_tokens=7)
            assert asked(kind.from_index(index, llm=other, ratio=0.3)) == (7, 0.3)
            assert (other.ratio, asked(kind.from_index(index, llm=other))[0]) == (None, 7)
            with pytest.raises(InputError, match="max_tokens"):
                kind.from_index(index, engine=scripted, max_tokens=0)
        with pytest.raises(InputError, match="'max_token'"):
            CacheBlendChatEngine.from_index(index, engine=scripted, max_token=16)

    def test_prompts_are_packed_for_the_llms_window(self, scripted: ScriptedEngine, index: VectorStoreIndex) -> None:
        for kind in (CacheBlendQueryEngine, CacheBlendChatEngine):
            made = kind.from_index(index, engine=scripted, similarity_top_k=6, context_window=1150)
            scripted.asked.clear()
            made.query(QUESTION) if isinstance(made, CacheBlendQueryEngine) else made.chat(QUESTION)
            assert len(scripted.asked) > 1

    async def test_every_answer_of_a_chat_reports_the_reuse_of_its_calls(
        self, scripted: ScriptedEngine, index: VectorStoreIndex
    ) -> None:
        chat = CacheBlendChatEngine.from_index(index, engine=scripted, similarity_top_k=2)
        first = chat.chat(QUESTION)
        assert [call["reason"] for call in first.metadata["cacheblend"]] == ["scripted"]
        assert first.metadata["cacheblend"][0]["usage"]["completion_tokens"] == 2
        assert len((await chat.achat(FOLLOW_UP)).metadata["cacheblend"]) == 2, "the question is condensed first"
        streamed = chat.stream_chat(FOLLOW_UP)
        assert "".join(streamed.response_gen) == "fine"
        assert len(streamed.metadata["cacheblend"]) == 2
        streamed = await chat.astream_chat(FOLLOW_UP)
        assert "".join([piece async for piece in streamed.async_response_gen()]) == "fine"
        assert len(streamed.metadata["cacheblend"]) == 2
