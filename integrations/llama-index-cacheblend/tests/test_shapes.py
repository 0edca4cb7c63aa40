"""LlamaIndex chains as people build them, end to end on the bundled model.

Each chain is built twice, with nothing different but the LLM. At ratio 1 the answer is that of a plain LLM of the same weights;
at 15% the chunks' tokens are served from stored KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import QueryBundle, Settings, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.llms import LLM
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever, RecursiveRetriever
from llama_index.core.schema import BaseNode, IndexNode
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from plain import PlainLLM

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_questions
from cacheblend_rag.frameworks import encoder_for
from llama_index_cacheblend import (
    BundledEmbedding,
    CacheBlendLLM,
    CacheBlendPostprocessor,
    CacheBlendRetriever,
    CacheBlendSynthesizer,
    collect_usage,
    node_text,
    qa_template,
)

QUESTION, FOLLOW_UP = (question.question for question in bundled_questions()[:2])
TOKENS = 12
# These templates put a space before a chunk ("New Context: {context_msg}", indentation), which changes its first token.
SPACE_BEFORE_CHUNK = {"refine, default template", "condense_plus_context", "condense_plus_context, streamed"}
REFINE = PromptTemplate("{query_str}\nSo far: {existing_answer}\n\n{context_msg}\n\nA better answer?")
Chain = Callable[[LLM, VectorStoreIndex], Any]


def query(**options: Any) -> Chain:
    def ask(llm: LLM, index: VectorStoreIndex) -> Any:
        Settings.llm = llm
        return index.as_query_engine(similarity_top_k=3, **options).query(QUESTION)

    return ask


def streamed(llm: LLM, index: VectorStoreIndex) -> str:
    Settings.llm = llm
    return "".join(index.as_query_engine(similarity_top_k=3, streaming=True).query(QUESTION).response_gen)


def asynchronous(mode: str) -> Chain:
    def ask(llm: LLM, index: VectorStoreIndex) -> Any:
        engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode)
        return asyncio.run(engine.aquery(QUESTION))

    return ask


def async_streamed(llm: LLM, index: VectorStoreIndex) -> str:
    async def run() -> str:
        response = await index.as_query_engine(llm=llm, similarity_top_k=3, streaming=True).aquery(QUESTION)
        return "".join([piece async for piece in response.async_response_gen()])

    return asyncio.run(run())


def reordered(llm: LLM, index: VectorStoreIndex) -> Any:
    neighbours = PrevNextNodePostprocessor(docstore=index.docstore, num_nodes=1, mode="next")
    engine = index.as_query_engine(llm=llm, similarity_top_k=2, node_postprocessors=[neighbours, LongContextReorder()])
    return engine.query(QUESTION)


def fused(llm: LLM, index: VectorStoreIndex) -> Any:
    retrievers = [index.as_retriever(similarity_top_k=2), index.as_retriever(similarity_top_k=3)]
    fusion = QueryFusionRetriever(
        retrievers, llm=llm, num_queries=1, mode="reciprocal_rerank", similarity_top_k=3, use_async=False
    )
    return RetrieverQueryEngine.from_args(fusion, llm=llm).query(QUESTION)


def parents(llm: LLM, index: VectorStoreIndex) -> Any:
    """Retrieve by small pointers, and answer from the whole nodes that they point to."""
    nodes = list(index.docstore.docs.values())[:8]
    pointers = [IndexNode(text=node_text(node)[:120], index_id=node.node_id) for node in nodes]
    small = VectorStoreIndex(pointers, embed_model=index._embed_model)
    recursive = RecursiveRetriever(
        "vector",
        retriever_dict={"vector": small.as_retriever(similarity_top_k=2)},
        node_dict={node.node_id: node for node in nodes},
    )
    return RetrieverQueryEngine.from_args(recursive, llm=llm).query(QUESTION)


def routed(llm: LLM, index: VectorStoreIndex) -> Any:
    tools = [
        QueryEngineTool.from_defaults(
            index.as_query_engine(llm=llm, similarity_top_k=3), name=name, description=description
        )
        for name, description in [("people", "Who somebody is, and their work"), ("music", "Songs and instruments")]
    ]
    summarizer = get_response_synthesizer(llm=llm, response_mode="tree_summarize")
    selector = EmbeddingSingleSelector.from_defaults(embed_model=index._embed_model)
    return RouterQueryEngine(selector, tools, llm=llm, summarizer=summarizer).query(QUESTION)


class TwoQuestions(BaseQuestionGenerator):
    def generate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        return [SubQuestion(sub_question=text, tool_name="notes") for text in (QUESTION, FOLLOW_UP)]

    async def agenerate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass


def sub_questions(llm: LLM, index: VectorStoreIndex) -> Any:
    notes: BaseQueryEngine = index.as_query_engine(llm=llm, similarity_top_k=3, text_qa_template=qa_template())
    engine = SubQuestionQueryEngine.from_defaults(
        [QueryEngineTool.from_defaults(notes, name="notes", description="The notes")],
        question_gen=TwoQuestions(),
        response_synthesizer=get_response_synthesizer(llm=llm),
        llm=llm,
        use_async=False,
        verbose=False,
    )
    return engine.query("Both?")


def chat(kind: type, **options: Any) -> Chain:
    def talk(llm: LLM, index: VectorStoreIndex) -> str:
        engine = kind.from_defaults(retriever=index.as_retriever(similarity_top_k=2), llm=llm, **options)
        return f"{engine.chat(QUESTION)} | {engine.chat(FOLLOW_UP)}"

    return talk


def streamed_chat(llm: LLM, index: VectorStoreIndex) -> str:
    engine = CondensePlusContextChatEngine.from_defaults(index.as_retriever(similarity_top_k=2), llm=llm)
    answers = ["".join(engine.stream_chat(text).response_gen) for text in (QUESTION, FOLLOW_UP)]
    return " | ".join(answers)


def condensed_question(llm: LLM, index: VectorStoreIndex) -> str:
    engine = CondenseQuestionChatEngine.from_defaults(index.as_query_engine(llm=llm, similarity_top_k=2), llm=llm)
    return f"{engine.chat(QUESTION)} | {engine.chat(FOLLOW_UP)}"


def from_parts(llm: LLM, index: VectorStoreIndex) -> Any:
    ours = CacheBlendSynthesizer(llm=llm) if isinstance(llm, CacheBlendLLM) else None
    plain = get_response_synthesizer(llm=llm, text_qa_template=qa_template()) if ours is None else None
    base = index.as_retriever(similarity_top_k=3)
    retriever = CacheBlendRetriever(base, llm.engine) if isinstance(llm, CacheBlendLLM) else base
    return RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=ours or plain).query(QUESTION)


SHAPES: dict[str, Chain] = {
    "compact": query(response_mode="compact"),
    "refine": query(response_mode="refine", refine_template=REFINE),
    "refine, default template": query(response_mode="refine"),
    "tree_summarize": query(response_mode="tree_summarize"),
    "accumulate": query(response_mode="accumulate"),
    "compact_accumulate": query(response_mode="compact_accumulate"),
    "streamed": streamed,
    "async": asynchronous("compact"),
    "async accumulate": asynchronous("accumulate"),
    "async streamed": async_streamed,
    "reordered and with neighbours": reordered,
    "fusion retriever": fused,
    "parent documents": parents,
    "router": routed,
    "sub-questions": sub_questions,
    "condense_plus_context": chat(CondensePlusContextChatEngine),
    "condense_plus_context, streamed": streamed_chat,
    "context": chat(ContextChatEngine),
    "condense_question": condensed_question,
    "our retriever and synthesizer": from_parts,
}


class Prompts(BaseEventHandler):
    """Records the text of every prompt that reaches an LLM, before this library sees it."""

    texts: list[str]

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.texts.append("\n".join(m.content or "" for m in event.messages))
        elif isinstance(event, LLMCompletionStartEvent):
            self.texts.append(event.prompt)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_ratio_1_gives_the_answer_of_a_plain_llm(
    shape: str, engine: BlendEngine, plain: Callable[..., PlainLLM], index: VectorStoreIndex
) -> None:
    apart = engine if shape in SPACE_BEFORE_CHUNK else None
    want = str(SHAPES[shape](plain(apart=apart, max_tokens=TOKENS), index))
    Settings.llm = ours = CacheBlendLLM(engine=engine, max_tokens=TOKENS, ratio=1.0)
    with collect_usage() as calls:
        got = str(SHAPES[shape](ours, index))
    assert got == want
    assert "blend" in [call.mode for call in calls]


@pytest.mark.parametrize("shape", list(SHAPES))
def test_chunks_are_served_from_stored_kv_at_15_percent(
    shape: str, engine: BlendEngine, index: VectorStoreIndex, nodes: list[BaseNode]
) -> None:
    Settings.llm = ours = CacheBlendLLM(engine=engine, max_tokens=4, ratio=0.15)
    prompts = Prompts(texts=[])
    get_dispatcher().event_handlers.append(prompts)
    engine.reset_prefix_cache()  # it has the prompts of other shapes
    with collect_usage() as calls:
        SHAPES[shape](ours, index)
    encode = encoder_for(engine.tokenizer).document
    whole = [node_text(node) for node in nodes for text in prompts.texts if node_text(node) in text]
    chunk_tokens = sum(len(encode(text)) for text in whole)
    headers = len(engine.header_ids) * len(calls)
    stored = sum(call.usage["reused_tokens"] + call.usage["recomputed_tokens"] for call in calls)
    recomputed = sum(call.usage["recomputed_tokens"] for call in calls)
    assert chunk_tokens > 300
    assert stored - headers >= 0.9 * chunk_tokens
    assert recomputed <= 0.16 * chunk_tokens
    # vLLM caches a blended prefix: a prompt repeated by another test is not blended again.
    assert recomputed > 0 or not isinstance(engine, TransformersEngine)


def test_escaped_chunks_are_answered_correctly_and_reused_from_the_second_prompt_on(
    engine: BlendEngine, plain: Callable[..., PlainLLM], index: VectorStoreIndex
) -> None:
    """Use LlamaIndex's SimpleSummarize, which prints a Python list into the prompt."""
    shape = query(response_mode="simple_summarize")
    with collect_usage() as calls:
        for _ in range(2):
            engine.reset_prefix_cache()
            got = str(shape(CacheBlendLLM(engine=engine, max_tokens=TOKENS, ratio=1.0), index))
            engine.flush()
    # The engine knows the escaped texts now, and tokenises the prompt at their edges.
    assert got == str(shape(plain(max_tokens=TOKENS, apart=engine), index))
    assert [[each["status"] for each in call.retrieved["chunks"]] for call in calls] == [
        ["not_stored"] * 3,
        ["reused"] * 3,
    ]
    assert calls[0].usage["reused_tokens"] == 0
    # At ratio 1 all tokens are recomputed, except for those that vLLM's prefix cache has of the first prompt.
    assert calls[1].usage["recomputed_tokens"] + calls[1].usage["reused_tokens"] > 300


def test_our_synthesizer_passes_whole_chunks_to_simple_summarize(engine: BlendEngine, index: VectorStoreIndex) -> None:
    synthesizer = CacheBlendSynthesizer(engine, response_mode="simple_summarize")
    response = RetrieverQueryEngine(index.as_retriever(similarity_top_k=3), synthesizer).query(QUESTION)
    (call,) = response.metadata["cacheblend"]
    assert "3 of 3 chunks" in call["reason"]


def test_text_replaced_by_a_postprocessor_is_registered_by_our_postprocessor_behind_it(
    engine: BlendEngine, index: VectorStoreIndex, embedding: BundledEmbedding
) -> None:
    class Shouting(MetadataReplacementPostProcessor):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            for item in nodes:
                item.node = item.node.model_copy()
                item.node.set_content("Replaced by a postprocessor. " + item.node.get_content()[:200])
            return nodes

    llm = CacheBlendLLM(engine=engine, max_tokens=2)
    chain = [Shouting(target_metadata_key="x")]
    for last, known in ((False, False), (True, True)):
        postprocessors = [*chain, CacheBlendPostprocessor(engine)] if last else chain
        asking = index.as_query_engine(llm=llm, similarity_top_k=2, node_postprocessors=postprocessors)
        with collect_usage() as calls:
            for _ in range(2):
                engine.reset_prefix_cache()
                asking.query(QUESTION)
        assert (calls[-1].mode == "blend") is known
        assert any("kv" in chunk["lacks"] for chunk in calls[-2].raw["chunks"]) is known


def test_source_nodes_come_with_every_answer(engine: BlendEngine, index: VectorStoreIndex) -> None:
    llm = CacheBlendLLM(engine=engine, max_tokens=2)
    response = index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
    assert len(response.source_nodes) == 3
    chat = CondensePlusContextChatEngine.from_defaults(index.as_retriever(similarity_top_k=3), llm=llm)
    assert len(chat.chat(QUESTION, chat_history=[ChatMessage(role="user", content="Hello.")]).source_nodes) == 3
