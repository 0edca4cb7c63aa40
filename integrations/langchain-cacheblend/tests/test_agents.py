"""Agents that look things up by a tool, as LangChain and LangGraph build them, reuse retrieved chunks at our defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition

from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, ChatCacheBlend, ChunkSplitter

from scripted import TEMPLATE, answer
from told_engine import ToldEngine

SYSTEM = "Answer from the notes."


@pytest.fixture(scope="module")
def told() -> Iterator[ToldEngine]:
    with ToldEngine(answer, TEMPLATE) as engine:
        yield engine


@pytest.fixture(scope="module")
def notes(told: ToldEngine, sources: list[Document], embedding: BundledEmbeddings) -> CacheBlendRetriever:
    chunks = ChunkSplitter(told, 96).split_documents([Document(sources[0].page_content[:3000], metadata={"page": 1})])
    return CacheBlendRetriever.from_documents(chunks, told, embedding=embedding, k=4)


def graph(llm: Any, tools: list[BaseTool], prompt: str) -> Any:
    """Build the agent of LangGraph's documentation from nodes."""
    bound = llm.bind_tools(tools)
    made = StateGraph(MessagesState)
    made.add_node("model", lambda state: {"messages": [bound.invoke([("system", prompt), *state["messages"]])]})
    made.add_node("tools", ToolNode(tools))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    return made.compile()


def react(llm: Any, tools: list[BaseTool], prompt: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it moved to create_agent, and most programs still call it
        return create_react_agent(llm, tools, prompt=prompt)


MAKERS: dict[str, Callable[..., Any]] = {
    "create_agent": lambda llm, tools, prompt: create_agent(llm, tools, system_prompt=prompt),
    "create_react_agent": react,
    "graph": graph,
}


def retriever_tool(notes: CacheBlendRetriever, form: Any) -> BaseTool:
    return create_retriever_tool(notes, "search_notes", "Looks up notes.", response_format=form)


def own_tool(notes: CacheBlendRetriever, form: Any) -> BaseTool:
    """Make the tool of LangChain's tutorial of RAG agents."""

    @tool(response_format=form)
    def search_notes(query: str) -> tuple[str, list[Document]]:
        """Looks up notes."""
        found = notes.invoke(query)
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    return search_notes


TOOLS = {"text": retriever_tool, "artifact": retriever_tool, "own": own_tool}
# Every question differs: a repeated prompt would come from the prefix cache without a blend.
ASKED = [
    ("create_agent", "text", "Sonia Halston"),
    ("create_agent", "artifact", "the bakery"),
    ("create_agent", "own", "the lighthouse"),
    ("create_react_agent", "text", "the ship's captain"),
    ("graph", "artifact", "the harbour"),
]


def check_reuse(messages: list[Any], told: ToldEngine) -> None:
    """Check that the tool was called, and that its chunks were read from stored KV, except for the policy's choice."""
    _, asking, found, last = messages
    assert isinstance(found, ToolMessage) and isinstance(last, AIMessage)
    assert [call["name"] for call in asking.tool_calls] == ["search_notes"]
    report = last.response_metadata["cacheblend"]
    assert (report["mode"], report["retrieved"]["summary"]) == ("blend", "4 of 4 retrieved chunks reused")
    usage = report["usage"]
    # The prefix cache has the prompt before the tool's answer, which is not blended.
    assert usage["kept_tokens"] >= asking.usage_metadata["input_tokens"] - 1
    length = sum(len(chunk.token_ids) for chunk in told.registry if chunk.text in found.text)
    assert length > 200
    assert usage["reused_tokens"] + usage["recomputed_tokens"] - usage["kept_tokens"] >= 0.9 * length
    assert 0 < usage["recomputed_tokens"] < length


@pytest.mark.parametrize(("maker", "form", "asked"), ASKED, ids=lambda value: value)
def test_an_agent_reuses_chunks_found_by_its_tool(
    maker: str, form: str, asked: str, told: ToldEngine, notes: CacheBlendRetriever
) -> None:
    llm = ChatCacheBlend(engine=told)
    agent = MAKERS[maker](llm, [TOOLS[form](notes, "content" if form == "text" else "content_and_artifact")], SYSTEM)
    state = agent.invoke({"messages": [HumanMessage(f"What about '{asked}'?")]})
    check_reuse(state["messages"], told)


async def test_a_streamed_agent_reuses_chunks_found_by_its_tool(told: ToldEngine, notes: CacheBlendRetriever) -> None:
    told.reset_prefix_cache()  # it has the prompts of the earlier agent
    agent = create_agent(ChatCacheBlend(engine=told), [retriever_tool(notes, "content")], system_prompt=SYSTEM)
    asked = {"messages": [HumanMessage("What about 'the song'?")]}
    messages: list[Any] = list(asked["messages"])
    async for step in agent.astream(asked, stream_mode="updates"):
        messages += [message for update in step.values() for message in update["messages"]]
    check_reuse(messages, told)


def test_tool_results_written_as_json_by_a_template_are_reused_from_the_second_prompt_on(
    embedding: BundledEmbeddings,
) -> None:
    """Use a template like Llama 3's: the chunks in its prompts are those of the escaped texts."""
    escaping = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] | tojson if m.role == 'tool' else m['content'] }}"
    )
    said = [
        Document(f'{name} said "no".\nNobody knows why; {name} was asked twice that year.') for name in ("Ada", "Bo")
    ]
    with ToldEngine(answer, escaping) as engine:
        found = CacheBlendRetriever.from_documents(said, engine, embedding=embedding, k=2)
        agent = create_agent(ChatCacheBlend(engine=engine, on_miss="error"), [retriever_tool(found, "content")])
        reports = [
            agent.invoke({"messages": [HumanMessage(question)]})["messages"][-1].response_metadata["cacheblend"]
            for question in ("Why 'no'?", "Who was asked?")
        ]
    assert [report["retrieved"]["summary"] for report in reports] == [
        "0 of 2 retrieved chunks reused, 2 not stored yet",
        "2 of 2 retrieved chunks reused",
    ]
    assert reports[1]["usage"]["reused_tokens"] > reports[0]["usage"]["reused_tokens"]
