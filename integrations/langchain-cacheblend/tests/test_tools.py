"""Tool calls: asked for, enforced, read off answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from cacheblend_rag import InputError, TransformersEngine
from cacheblend_rag.frameworks import CallReader, call_schema, required_tool
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


TOOLS = [convert_to_openai_tool(t) for t in (search, weather)]
CALL = {"name": "search", "arguments": {"query": "harbour {old} ]"}}
BLOCK = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def read(text: str, sizes: list[int] | None = None, required: Any = False) -> tuple[str, list[Any], list[Any]]:
    reader = CallReader(TOOLS, required)
    sent, at = "", 0
    for size in sizes or [len(text)]:
        sent += reader.push(text[at : at + size])
        at += size
    sent += reader.push(text[at:])
    read = reader.finish()
    return sent + read.text, list(map(tuple, read.calls)), list(read.invalid)


ANSWERS = {
    BLOCK: ("", [("search", CALL["arguments"])], []),
    f"Let me see.\n{BLOCK}\n{BLOCK}": ("Let me see.\n", [("search", CALL["arguments"])] * 2, []),
    BLOCK.removesuffix("</tool_call>"): ("", [("search", CALL["arguments"])], []),
    json.dumps(CALL): ("", [("search", CALL["arguments"])], []),
    "\n" + json.dumps([CALL, {"name": "weather", "parameters": '{"place": {"city": "x"}}'}]): (
        "",
        [("search", CALL["arguments"]), ("weather", {"place": {"city": "x"}})],
        [],
    ),
    '{"name": "no such tool", "arguments": {}}': ('{"name": "no such tool", "arguments": {}}', [], []),
    "[1] says so. {x}": ("[1] says so. {x}", [], []),
    "a < b and <tool": ("a < b and <tool", [], []),
    "<tool_call>{broken</tool_call>": ("", [], ["{broken"]),
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': ("", [], ['{"name": "rm", "arguments": {}}']),
    "": ("", [], []),
    "  ": ("  ", [], []),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_and_text_are_told_apart(answer: str) -> None:
    assert read(answer) == ANSWERS[answer]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(ANSWERS)), st.lists(st.integers(1, 9), max_size=30))
def test_it_does_not_matter_how_an_answer_is_cut(answer: str, sizes: list[int]) -> None:
    assert read(answer, sizes) == ANSWERS[answer]


@pytest.mark.parametrize("size", [1, 9, 99])
def test_a_forced_call_that_was_cut_off_is_invalid_and_never_the_answer(size: int) -> None:
    whole = json.dumps(CALL)
    assert read(whole, [size], True) == ("", [("search", CALL["arguments"])], [])
    assert read(whole[:-3], [size], "search") == ("", [], [whole[:-3]])
    assert read("", None, True) == ("", [], [""])


def test_text_before_a_call_is_not_held_back() -> None:
    reader = CallReader(TOOLS)
    assert reader.push("Let me see. ") == "Let me see. "
    assert reader.push("<tool") == ""
    assert reader.push("box> is ") == "<toolbox> is "


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, False),
        ("auto", False),
        ("none", False),
        (False, False),
        ("any", True),
        ("required", True),
        (True, True),
        ("weather", "weather"),
        ({"type": "function", "function": {"name": "search"}}, "search"),
        ({"name": "search"}, "search"),
    ],
)
def test_tool_choices_of_all_kinds_are_understood(choice: Any, wanted: Any) -> None:
    assert required_tool(choice, TOOLS) == wanted


def test_a_choice_of_no_bound_tool_is_refused(scripted: ScriptedEngine) -> None:
    with pytest.raises(InputError, match="search, weather"):
        required_tool("rm", TOOLS)
    with pytest.raises(InputError, match="rm"):
        ChatCacheBlend(engine=scripted).bind_tools([search], tool_choice={"function": {"name": "rm"}})


class Node(BaseModel):
    """A tree."""

    label: str
    children: list[Node] = []


def test_call_schemas_accept_calls_and_nothing_else() -> None:
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "tree", "parameters": Node.model_json_schema()["$defs"]["Node"]}},
    ]
    tools[2]["function"]["parameters"] = {
        **tools[2]["function"]["parameters"],
        "$defs": Node.model_json_schema()["$defs"],
    }
    schema = call_schema(tools, True)
    Draft202012Validator.check_schema(schema)
    valid = Draft202012Validator(schema).is_valid
    assert valid(CALL)
    assert valid({"name": "tree", "arguments": {"label": "a", "children": [{"label": "b", "children": []}]}})
    assert not valid({"name": "tree", "arguments": {"label": "a", "children": [{"label": 3}]}})
    assert not valid({"name": "rm", "arguments": {}})
    assert not valid({**CALL, "more": 1})
    only = Draft202012Validator(call_schema(tools, "weather")).is_valid
    assert only({"name": "weather", "arguments": {"place": {"city": "x"}}}) and not only(CALL)


def test_a_call_without_tool_choice_is_read_off_the_answer(scripted: ScriptedEngine) -> None:
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


def test_an_unreadable_call_is_an_invalid_one() -> None:
    llm = ChatCacheBlend(engine=ScriptedEngine(answer="<tool_call>{oops</tool_call>")).bind_tools([search])
    assert [c["args"] for c in llm.invoke("x").invalid_tool_calls] == ["{oops"]
    chunks = list(llm.stream("x"))
    assert ["{oops" in c["args"] for c in chunks[-1].invalid_tool_calls] == [True]
    assert chunks[-1].tool_calls == []


def test_tool_choice_none_shows_no_tools(scripted: ScriptedEngine) -> None:
    answer = ChatCacheBlend(engine=scripted).bind_tools([search], tool_choice="none").invoke("x")
    assert answer.content == "Answer to: x"


def test_models_whose_template_shows_no_tools_say_so(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="does not show tools"):
        ChatCacheBlend(engine=engine).bind_tools([search]).invoke("x")
