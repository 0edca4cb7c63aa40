"""Tests that histories and checkpointers let earlier turns come from the prefix cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains import ConversationChain
from langchain_classic.memory import ConversationBufferMemory
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from test_chain_shapes import RetrieveFirst

from cacheblend_rag import BlendEngine, TransformersEngine
from langchain_cacheblend import CacheBlendLLM, CacheBlendRetriever, ChatCacheBlend

QUESTIONS = ["Who founded the bakery?", "And who runs it now?", "Which songs are known?", "Where is the harbour?"]
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer from the notes."),
        MessagesPlaceholder("history"),
        ("human", "{context}\n\nQuestion: {question}"),
    ]
)
Ask = Callable[[str, list[BaseCallbackHandler]], Any]


class Usages(BaseCallbackHandler):
    """Records the usage of every call."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        made = response.generations[0][0]
        about = made.message.response_metadata if hasattr(made, "message") else made.generation_info
        self.seen.append(about["cacheblend"]["usage"])


@pytest.fixture
def llm(engine: BlendEngine) -> Iterator[ChatCacheBlend]:
    engine.reset_prefix_cache()
    yield ChatCacheBlend(engine=engine, max_tokens=8, ratio=0.15)


def with_message_history(
    llm: ChatCacheBlend, retriever: CacheBlendRetriever, histories: dict[str, InMemoryChatMessageHistory]
) -> Ask:
    def notes(given: dict[str, Any]) -> str:
        return "\n\n".join(d.page_content for d in retriever.invoke(given["question"])[:2])

    chain = RunnableWithMessageHistory(
        RunnablePassthrough.assign(context=RunnableLambda(notes)) | PROMPT | llm,
        lambda session: histories.setdefault(session, InMemoryChatMessageHistory()),
        input_messages_key="question",
        history_messages_key="history",
    )

    def ask(question: str, callbacks: list[BaseCallbackHandler]) -> Any:
        return chain.invoke({"question": question}, {"configurable": {"session_id": "s"}, "callbacks": callbacks})

    return ask


def agent_with_a_checkpointer(llm: ChatCacheBlend, retriever: CacheBlendRetriever) -> Ask:
    tool = create_retriever_tool(retriever, "search_notes", "Looks up notes.", response_format="content_and_artifact")
    agent = create_agent(
        llm,
        [tool],
        system_prompt="Answer from the notes.",
        middleware=[RetrieveFirst()],
        checkpointer=InMemorySaver(),
    )
    return threaded(agent)


def graph_with_a_checkpointer(llm: ChatCacheBlend, retriever: CacheBlendRetriever) -> Ask:
    def look_up(state: MessagesState) -> dict[str, Any]:
        question = state["messages"][-1]
        notes = "\n\n".join(d.page_content for d in retriever.invoke(str(question.text))[:2])
        return {"messages": [HumanMessage(f"{notes}\n\nQuestion: {question.text}", id=question.id)]}

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_sequence([look_up, answer]).add_edge(START, "look_up")
    return threaded(graph.compile(checkpointer=InMemorySaver()))


def threaded(graph: Any) -> Ask:
    def ask(question: str, callbacks: list[BaseCallbackHandler]) -> Any:
        config = {"configurable": {"thread_id": "t"}, "callbacks": callbacks}
        return graph.invoke({"messages": [HumanMessage(question)]}, config)

    return ask


def usages(ask: Ask) -> list[dict[str, Any]]:
    found = Usages()
    for question in QUESTIONS:
        ask(question, [found])
    assert len(found.seen) == len(QUESTIONS)
    return found.seen


@pytest.fixture
def block(engine: BlendEngine) -> int:
    """Return how many tokens may be computed again at the end of a cached prefix."""
    return 4 if isinstance(engine, TransformersEngine) else 128


@pytest.mark.parametrize("make", [agent_with_a_checkpointer, graph_with_a_checkpointer])
def test_a_checkpointer_lets_the_whole_earlier_prompt_come_from_the_prefix_cache(
    make: Any, llm: ChatCacheBlend, retriever: CacheBlendRetriever, block: int
) -> None:
    for before, after in pairwise(usages(make(llm, retriever))):
        assert after["kept_tokens"] > before["prompt_tokens"] - block
        # New tokens are the answer, the question and the notes, and only a share of the notes is computed.
        assert after["computed_tokens"] < 0.5 * (after["prompt_tokens"] - before["prompt_tokens"]) + block


def test_a_message_history_before_the_notes_is_cached_except_for_the_last_exchange(
    llm: ChatCacheBlend, retriever: CacheBlendRetriever, block: int
) -> None:
    histories: dict[str, InMemoryChatMessageHistory] = {}
    seen = usages(with_message_history(llm, retriever, histories))
    said = histories["s"].messages
    for turn, usage in enumerate(seen[2:], 2):
        earlier = [SystemMessage("Answer from the notes."), *said[: 2 * turn - 2]]
        assert usage["kept_tokens"] > llm.get_num_tokens_from_messages(earlier) - block


def test_answers_with_a_cached_history_equal_those_of_full_recompute(
    llm: ChatCacheBlend, retriever: CacheBlendRetriever
) -> None:
    kept, whole = (
        with_message_history(llm.model_copy(update=how), retriever, {})
        for how in ({"ratio": 1.0}, {"ratio": None, "quality": "full"})
    )
    for question in QUESTIONS:
        assert kept(question, []).content == whole(question, []).content


@pytest.mark.parametrize("text_model", [False, True])
def test_a_memory_in_a_single_text_is_cached_from_the_second_turn_on(
    text_model: bool, llm: ChatCacheBlend, engine: BlendEngine, block: int
) -> None:
    asked = CacheBlendLLM(engine=engine, max_tokens=8) if text_model else llm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are deprecated in LangChain and still in use
        chain = ConversationChain(llm=asked, memory=ConversationBufferMemory())
        seen = usages(lambda question, callbacks: chain.invoke(question, {"callbacks": callbacks}))
    for before, after in pairwise(seen[1:]):
        assert after["kept_tokens"] > before["prompt_tokens"] - block - 4
