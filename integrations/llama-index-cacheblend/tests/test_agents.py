"""Agents, routers and sub-questions as LlamaIndex makes them reuse chunks at our defaults. Each test runs with a chat
template that shows tools, and with one that does not, for which LlamaIndex asks in words (ReAct)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from test_tool_model import TEMPLATE
from told_engine import ToldEngine

from cacheblend_rag import SamplingParams
from cacheblend_rag.frameworks import encoder_for
from llama_index_cacheblend import BundledEmbedding, collect_usage, precompute_nodes, use_engine

QUESTIONS = ("Who runs the old company?", "Where does it lie?")
CALL = {"people": {"input": QUESTIONS[0]}, "SingleSelection": {"index": 1, "reason": "It fits."}}
CALL["MultiSelection"] = {"selections": [{"index": at, "reason": "It fits."} for at in (1, 2)]}


def say(text: str, sampling: SamplingParams) -> str:
    """Answer as a good model would: call the tool first, choose, split the question; else answer."""
    for name, arguments in CALL.items():
        shown = f'"name": "{name}"' in text and "<<tool>>" not in text
        if shown and (sampling.json_schema is None) == (name == "people"):
            call = json.dumps({"name": name, "arguments": arguments})
            return call if sampling.json_schema is not None else f"<tool_call>{call}</tool_call>"
    if "Action Input" in text:
        if "Observation:" in text.rpartition("Current Conversation")[2]:
            return "Thought: I can answer without using any more tools.\nAnswer: Fine."
        return f"Thought: I need a tool.\nAction: people\nAction Input: {json.dumps(CALL['people'])}"
    if "sub_question" in text:
        asked = zip(QUESTIONS, ("people", "places"), strict=True)
        return json.dumps({"items": [{"sub_question": question, "tool_name": tool} for question, tool in asked]})
    if "Some choices are given below" in text:
        chosen = (1, 2) if "top choices" in text else (1,)
        return json.dumps([{"choice": at, "reason": "It fits."} for at in chosen])
    return "Fine."


@pytest.fixture(scope="module", params=[None, TEMPLATE], ids=["in words", "by calls"])
def told(request: pytest.FixtureRequest) -> Iterator[ToldEngine]:
    with ToldEngine(say, request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def kept(told: ToldEngine, documents: list[Document], embedding: BundledEmbedding) -> VectorStoreIndex:
    splitter = SentenceSplitter(chunk_size=120, chunk_overlap=0, tokenizer=encoder_for(told.tokenizer).document)
    document = Document(text=documents[0].text[:3000], metadata=documents[0].metadata)
    nodes = splitter.get_nodes_from_documents([document])
    precompute_nodes(told, nodes)
    return VectorStoreIndex(nodes, embed_model=embedding)


def tools(index: VectorStoreIndex) -> list[QueryEngineTool]:
    notes = index.as_query_engine(similarity_top_k=3)
    named = {"people": "Who somebody is, and their work", "places": "Where things are"}
    return [QueryEngineTool.from_defaults(notes, name=name, description=what) for name, what in named.items()]


def agent(*tools: Any) -> Any:
    async def run() -> Any:
        return await AgentWorkflow.from_tools_or_functions(list(tools), system_prompt="Be brief.").run(QUESTIONS[0])

    return asyncio.run(run())


def router(index: VectorStoreIndex, **options: Any) -> Any:
    return RouterQueryEngine.from_defaults(tools(index), **options).query(QUESTIONS[0])


def sub_questions(index: VectorStoreIndex, **options: Any) -> Any:
    # Without a generator of questions, LlamaIndex needs its package for OpenAI's.
    generator = LLMQuestionGenerator.from_defaults()
    engine = SubQuestionQueryEngine.from_defaults(tools(index), question_gen=generator, verbose=False, **options)
    return engine.query("Who runs it, and where?")


# Each shape lists its prompts in order: true where the prompt has chunks.
SHAPES: dict[str, tuple[Callable[[VectorStoreIndex], Any], list[bool]]] = {
    "agent, retriever": (
        lambda index: agent(
            RetrieverTool.from_defaults(index.as_retriever(similarity_top_k=3), name="people", description="Notes")
        ),
        [False, True],
    ),
    "agent, query engines": (lambda index: agent(*tools(index)), [False, True, False]),
    "router": (router, [False, True]),
    "router, several": (lambda index: router(index, select_multi=True), [False, True, True, False]),
    "sub-questions": (sub_questions, [False, True, True, False]),
    "sub-questions, one by one": (lambda index: sub_questions(index, use_async=False), [False, True, True, False]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_retrieved_by_agents_routers_and_sub_questions_are_read_from_stored_kv(
    shape: str, told: ToldEngine, kept: VectorStoreIndex
) -> None:
    use_engine(told)
    run, holds = SHAPES[shape]
    with collect_usage() as calls:
        assert "Fine." in str(run(kept))
    assert [call.mode == "blend" for call in calls] == holds
    for call in calls:
        if call.mode == "blend":
            assert (call.reason, call.retrieved["reused"]) == ("stored KV for 3 of 3 chunks", 3)
            usage = call.usage
            # A repeated prompt comes whole from the prefix cache, without a blend.
            assert usage["reused_tokens"] + usage["recomputed_tokens"] - usage["kept_tokens"] > 250 or (
                usage["kept_tokens"] >= usage["prompt_tokens"] - 1
            )
    if "agent" in shape:
        # The agent's second prompt continues its first.
        assert calls[-1].usage["kept_tokens"] >= calls[0].usage["prompt_tokens"] - 1
