"""Tests tool calls: requested, enforced, and parsed from answers."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from cacheblend_rag import InputError, TransformersEngine
from langchain_cacheblend import ChatCacheBlend

from scripted import ScriptedEngine


class Place(BaseModel):
    city: str


@tool
def search(query: str, limit: int = 3) -> str:
    """Look something up."""
    return query


@tool
def weather(place: Place) -> str:
    """Say how the weather is."""
    return place.city


def test_a_choice_of_an_unbound_tool_is_refused(scripted: ScriptedEngine) -> None:
    with pytest.raises(InputError, match="rm"):
        ChatCacheBlend(engine=scripted).bind_tools([search], tool_choice={"function": {"name": "rm"}})


def test_a_call_without_tool_choice_is_parsed_from_the_answer(scripted: ScriptedEngine) -> None:
    llm = ChatCacheBlend(engine=scripted).bind_tools([search])
    answer = llm.invoke("What of 'Marlow'?")
    assert [(c["name"], c["args"]["query"]) for c in answer.tool_calls] == [("search", "Marlow")]
    assert answer.content == "Let me see.\n"
    assert scripted.sampling[-1].json_schema is None
    streamed = None
    for chunk in llm.stream("What of 'Marlow'?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in answer.tool_calls]
    assert streamed.content == answer.content


async def test_an_agent_executes_a_call_in_a_code_fence() -> None:
    """Qwen2.5-Coder writes its calls so."""
    engine = ScriptedEngine(answer='```json\n{\n  "name": "search",\n  "arguments": {"query": "Marlow"}\n}\n```')

    @tool
    def search(query: str) -> str:
        """Look something up."""
        engine.answer = f"Notes on {query}."
        return query

    agent = create_agent(ChatCacheBlend(engine=engine), [search])
    called = engine.answer
    for streamed in (False, True):
        engine.answer = called
        if streamed:
            *_, state = [step async for step in agent.astream({"messages": ["x"]}, stream_mode="values")]
        else:
            state = await agent.ainvoke({"messages": ["x"]})
        assert [m.type for m in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][-1].content == "Notes on Marlow."
    engine.answer = called
    assert ChatCacheBlend(engine=engine).invoke("x").content == called, "no tool is bound"
    assert ChatCacheBlend(engine=engine).bind_tools([weather]).invoke("x").content == called, "another tool is bound"


def test_an_unreadable_call_is_reported_as_invalid() -> None:
    llm = ChatCacheBlend(engine=ScriptedEngine(answer="<tool_call>{oops</tool_call>")).bind_tools([search])
    assert [c["args"] for c in llm.invoke("x").invalid_tool_calls] == ["{oops"]
    chunks = list(llm.stream("x"))
    assert ["{oops" in c["args"] for c in chunks[-1].invalid_tool_calls] == [True]
    assert chunks[-1].tool_calls == []


def test_tool_choice_none_shows_no_tools(scripted: ScriptedEngine) -> None:
    answer = ChatCacheBlend(engine=scripted).bind_tools([search], tool_choice="none").invoke("x")
    assert answer.content == "Answer to: x"


def test_a_model_whose_template_shows_no_tools_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="does not show tools"):
        ChatCacheBlend(engine=engine).bind_tools([search]).invoke("x")


def test_an_agent_with_a_response_format_may_still_call_its_tools() -> None:
    engine = ScriptedEngine(answer='{"name": "search", "arguments": {"query": "Marlow", "limit": 1}}')

    @tool
    def search(query: str, limit: int) -> str:
        """Look something up."""
        engine.answer = '{"city": "Marlow"}'
        return query

    state = create_agent(ChatCacheBlend(engine=engine), [search], response_format=Place).invoke(
        {"messages": ["Where?"]}
    )
    assert state["structured_response"] == Place(city="Marlow")
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
    may_say = [Draft202012Validator(sampling.json_schema).is_valid for sampling in engine.sampling]
    for allowed in may_say:
        assert allowed({"city": "Marlow"}) and not allowed({"name": "rm", "arguments": {}})
        assert allowed({"name": "search", "arguments": {"query": "x", "limit": 1}})


def test_calls_have_ids_that_every_template_accepts() -> None:
    """Use a check like that of Mistral's templates, which refuse other ids."""
    engine = ScriptedEngine(answer='[{"name": "search", "arguments": {"query": "Marlow"}}]')
    refused = "{% if ID|length != 9 or not ID.isalnum() %}{{ raise_exception('nine letters and digits!') }}{% endif %}"
    engine.tokenizer.chat_template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + refused.replace("ID", "c.id") + "{% endfor %}"
        "{% if m.role == 'tool' %}" + refused.replace("ID", "m.tool_call_id") + "{% endif %}{% endfor %}"
    )
    llm = ChatCacheBlend(engine=engine).bind_tools([search])
    asking = llm.invoke("What of Marlow?")
    engine.answer = "Fine."
    answer = llm.invoke([HumanMessage("What of Marlow?"), asking, search.invoke(asking.tool_calls[0])])
    assert answer.content == "Fine."
