"""Runs an agent with a retriever tool on a CacheBlend engine: ``python examples/langchain_agent.py [model]``.

The tool returns its documents as an artifact beside the text, and the model takes its chunks from there. The bundled model
cannot call tools, so a middleware looks every question up first; with a model that can, it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse, hook_config
from langchain_cacheblend import CacheBlendRetriever, ChatCacheBlend, ChunkSplitter
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool
from langchain_rag import QUESTIONS, load_documents

from cacheblend_rag import BlendEngine, TransformersEngine


class RetrieveFirst(AgentMiddleware[Any, Any]):
    """Calls the tool with the user's question, then lets the model answer without tools, from notes and question."""

    @hook_config(can_jump_to=["tools"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        last = state["messages"][-1]
        if not isinstance(last, HumanMessage):
            return None
        call = {"name": "search_notes", "args": {"query": last.text}, "id": f"first-{len(state['messages'])}"}
        return {"messages": [AIMessage("", tool_calls=[call])], "jump_to": "tools"}

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        *_, question, _, found = request.messages
        assert isinstance(found, ToolMessage)
        asked = HumanMessage(f"{found.text}\n\nQuestion: {question.text}")
        return handler(request.override(tools=[], messages=[asked]))


def main(engine: BlendEngine | None = None) -> dict[str, Any]:
    engine = engine or TransformersEngine(*sys.argv[1:2])
    chunks = ChunkSplitter(engine, max_tokens=512).split_documents(load_documents())
    retriever = CacheBlendRetriever.from_documents(chunks, engine=engine, k=6)
    search = create_retriever_tool(
        retriever,
        "search_notes",
        "Looks up notes about companies, people, observatories and ships.",
        response_format="content_and_artifact",
    )
    llm = ChatCacheBlend(engine=engine, max_tokens=24)
    shows_tools = bool(llm.profile and llm.profile.get("tool_calling"))
    agent = create_agent(
        llm,
        [search],
        system_prompt="Answer from the notes.",
        middleware=[] if shows_tools else [RetrieveFirst()],
    )
    question = QUESTIONS[0]
    answer = agent.invoke({"messages": [HumanMessage(question)]})["messages"][-1]
    report = answer.response_metadata["cacheblend"]
    print(question, answer.text.strip())
    print(f"  {report['mode']}: {report['reason']}; {report['usage']}")
    return {"answer": answer.text.strip(), "usage": answer.usage_metadata}


if __name__ == "__main__":
    main()
