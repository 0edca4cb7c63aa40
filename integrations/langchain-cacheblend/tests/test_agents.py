"""Agents that look things up by a tool, as LangChain and LangGraph build them, at our defaults: what their prompts reuse."""

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
    """The agent that LangGraph's own pages build of nodes."""
    bound = llm.bind_tools(tools)
    made = StateGraph(MessagesState)
    made.add_node("model", lambda state: {"messages": [bound.invoke([("system", prompt), *state["messages"]])]})
    made.add_node("tools", ToolNode(tools))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    return made.compile()


def react(llm: Any, tools: list[BaseTool], prompt: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it has moved to create_agent, and is what most programs still call
        return create_react_agent(llm, tools, prompt=prompt)


MAKERS: dict[str, Callable[..., Any]] = {
    "create_agent": lambda llm, tools, prompt: create_agent(llm, tools, system_prompt=prompt),
    "create_react_agent": react,
    "graph": graph,
}


def retriever_tool(notes: CacheBlendRetriever, form: Any) -> BaseTool:
    return create_retriever_tool(notes, "search_notes", "Looks up notes.", response_format=form)


def own_tool(notes: CacheBlendRetriever, form: Any) -> BaseTool:
    """The tool of LangChain's tutorial of RAG agents."""

    @tool(response_format=form)
    def search_notes(query: str) -> tuple[str, list[Document]]:
        """Looks up notes."""
        found = notes.invoke(query)
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    return search_notes


TOOLS = {"text": retriever_tool, "artifact": retriever_tool, "own": own_tool}
# Nobody asks the same twice: a prompt that was answered before is kept whole, and nothing of it is blended again.
ASKED = [
    ("create_agent", "text", "Sonia Halston"),
    ("create_agent", "artifact", "the bakery"),
    ("create_agent", "own", "the lighthouse"),
    ("create_react_agent", "text", "the ship's captain"),
    ("graph", "artifact", "the harbour"),
]


def check_reuse(messages: list[Any], told: ToldEngine) -> None:
    """The tool was called, and what it found was in stored KV and read from there, but for what the policy chose."""
    _, asking, found, last = messages
    assert isinstance(found, ToolMessage) and isinstance(last, AIMessage)
    assert [call["name"] for call in asking.tool_calls] == ["search_notes"]
    report = last.response_metadata["cacheblend"]
    assert (report["mode"], report["retrieved"]["summary"]) == ("blend", "4 of 4 retrieved chunks reused")
    usage = report["usage"]
    # What was said before the tool answered is kept of the first prompt, and not blended.
    assert usage["kept_tokens"] >= asking.usage_metadata["input_tokens"] - 1
    length = sum(len(chunk.token_ids) for chunk in told.registry if chunk.text in found.text)
    assert length > 200
    assert usage["reused_tokens"] + usage["recomputed_tokens"] - usage["kept_tokens"] >= 0.9 * length
    assert 0 < usage["recomputed_tokens"] < length


@pytest.mark.parametrize(("maker", "form", "asked"), ASKED, ids=lambda value: value)
def test_an_agent_reuses_what_its_tool_has_found(
    maker: str, form: str, asked: str, told: ToldEngine, notes: CacheBlendRetriever
) -> None:
    llm = ChatCacheBlend(engine=told)
    agent = MAKERS[maker](llm, [TOOLS[form](notes, "content" if form == "text" else "content_and_artifact")], SYSTEM)
    state = agent.invoke({"messages": [HumanMessage(f"What about '{asked}'?")]})
    check_reuse(state["messages"], told)


async def test_a_streamed_agent_reuses_it_too(told: ToldEngine, notes: CacheBlendRetriever) -> None:
    told.reset_prefix_cache()  # which has the prompts of the agent that was not streamed
    agent = create_agent(ChatCacheBlend(engine=told), [retriever_tool(notes, "content")], system_prompt=SYSTEM)
    asked = {"messages": [HumanMessage("What about 'the song'?")]}
    messages: list[Any] = list(asked["messages"])
    async for step in agent.astream(asked, stream_mode="updates"):
        messages += [message for update in step.values() for message in update["messages"]]
    check_reuse(messages, told)


def test_where_a_template_writes_tool_results_in_json_they_are_reused_from_the_second_prompt_on(
    embedding: BundledEmbeddings,
) -> None:
    """Llama 3's does: the chunks that stand in its prompts are those of the texts as they are escaped."""
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
