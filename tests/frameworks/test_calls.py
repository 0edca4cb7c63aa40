"""Tests of tool calls: requested tools, the schema that enforces calls, and reading calls from answers cut into any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cacheblend_rag.errors import InputError
from cacheblend_rag.frameworks.calls import NO_TOOLS, CallReader, ToolsAsked, call_schema, required_tool, tools_asked


def tool(name: str, properties: dict[str, Any], required: str, **more: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": [required], **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    tool("search", {"query": {"type": "string"}, "limit": {"type": "integer", "default": 3}}, "query"),
    tool("weather", {"place": CITY}, "place"),
]
NODE = {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}
TREE = tool("tree", NODE, "label", **{"$defs": {"Node": {"type": "object", "properties": NODE, "required": ["label"]}}})
CALL = {"name": "search", "arguments": {"query": "harbour {old} ]"}}
BLOCK = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
FENCED = f"```json\n{json.dumps(CALL, indent=2)}\n```"  # the form of Qwen2.5-Coder
NOTE = {"name": "search", "arguments": {"query": "```sh\nls {}```"}}
OTHERS = """```json
{"name": "rm", "arguments": {}}
```
The record is ```{"name": "search", "since": 1911}```, the code
```js
{ a: [1] }
```
and ```python
print()
```"""


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
    '{"name": {"first": "Ada"}, "age": 36}': ('{"name": {"first": "Ada"}, "age": 36}', [], []),
    '<tool_call>{"name": ["search"]}</tool_call>': ("", [], ['{"name": ["search"]}']),
    "[" * 5000: ("[" * 5000, [], []),
    "a < b and <tool": ("a < b and <tool", [], []),
    "<tool_call>{broken</tool_call>": ("", [], ["{broken"]),
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': ("", [], ['{"name": "rm", "arguments": {}}']),
    FENCED: ("", [("search", CALL["arguments"])], []),
    f"```json {json.dumps(CALL)} ```": ("", [("search", CALL["arguments"])], []),
    f"Let me see.\n{FENCED}\nThen `read` it.": (
        "Let me see.\n\nThen `read` it.",
        [("search", CALL["arguments"])],
        [],
    ),
    FENCED.removesuffix("\n```"): ("", [("search", CALL["arguments"])], []),
    FENCED[:-20]: (FENCED[:-20], [], []),
    f"```\n{json.dumps([CALL, NOTE])}\n```": ("", [("search", one["arguments"]) for one in (CALL, NOTE)], []),
    OTHERS: (OTHERS, [], []),
    f"{OTHERS}\n{FENCED}": (f"{OTHERS}\n", [("search", CALL["arguments"])], []),
    "": ("", [], []),
    "  ": ("  ", [], []),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_reader_separates_calls_from_text(answer: str) -> None:
    assert read(answer) == ANSWERS[answer]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(ANSWERS)), st.lists(st.integers(1, 9), max_size=30))
def test_a_reader_finds_the_same_calls_in_pieces_of_any_size(answer: str, sizes: list[int]) -> None:
    assert read(answer, sizes) == ANSWERS[answer]


@pytest.mark.parametrize("size", [1, 9, 99])
def test_a_truncated_forced_call_is_invalid_and_never_the_answer(size: int) -> None:
    whole = json.dumps(CALL)
    assert read(whole, [size], True) == ("", [("search", CALL["arguments"])], [])
    assert read(whole[:-3], [size], "search") == ("", [], [whole[:-3]])
    assert read("", None, True) == ("", [], [""])


def test_text_before_a_call_is_not_held_back() -> None:
    reader = CallReader(TOOLS)
    assert reader.push("Let me see. ") == "Let me see. "
    assert reader.push("<tool") == ""
    assert reader.push("box> is ") == "<toolbox> is "
    assert reader.push("``") == ""
    assert reader.push("`py\nprint()\n``") == "```py\nprint()\n"
    assert reader.push("`\nIt is {}") == "```\nIt is {}"
    assert reader.push('\n```json\n{"name": 1') == "\n"
    assert reader.push("}\n```\n") == '```json\n{"name": 1}\n```\n'


def test_schemas_may_have_definitions_under_their_older_name() -> None:
    older = tool("weather", {"place": {"$ref": "#/definitions/City"}}, "place", definitions={"City": CITY})
    valid = Draft202012Validator(call_schema([TREE, older], True)).is_valid
    assert valid({"name": "weather", "arguments": {"place": {"city": "x"}}})
    assert not valid({"name": "weather", "arguments": {"place": {"city": 3}}})


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
def test_tool_choices_of_every_form_are_accepted(choice: Any, wanted: Any) -> None:
    assert required_tool(choice, TOOLS) == wanted


def test_a_choice_of_an_unknown_tool_is_refused() -> None:
    with pytest.raises(InputError, match="search, weather"):
        required_tool("rm", TOOLS)


def test_a_prompt_shows_no_tools_if_calls_are_forbidden_or_no_tools_are_given() -> None:
    assert tools_asked(TOOLS, "none") == tools_asked([], "rm") == NO_TOOLS
    assert tools_asked(TOOLS, "weather") == ToolsAsked(TOOLS, "weather")


def test_call_schemas_accept_only_valid_calls() -> None:
    schema = call_schema([*TOOLS, TREE], True)
    Draft202012Validator.check_schema(schema)
    valid = Draft202012Validator(schema).is_valid
    assert valid(CALL)
    assert valid({"name": "tree", "arguments": {"label": "a", "children": [{"label": "b", "children": []}]}})
    assert not valid({"name": "tree", "arguments": {"label": "a", "children": [{"label": 3}]}})
    assert not valid({"name": "rm", "arguments": {}})
    assert not valid({**CALL, "more": 1})
    only = Draft202012Validator(call_schema([*TOOLS, TREE], "weather")).is_valid
    assert only({"name": "weather", "arguments": {"place": {"city": "x"}}}) and not only(CALL)


def test_a_schema_accepts_calls_and_answers_of_the_answer_schema() -> None:
    answer = {**CITY, "properties": {"city": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": {"type": "string"}}}
    schema = call_schema([*TOOLS, TREE], True, answer)
    Draft202012Validator.check_schema(schema)
    valid = Draft202012Validator(schema).is_valid
    assert valid(CALL) and valid({"city": "x"})
    assert valid({"name": "tree", "arguments": {"label": "a", "children": [{"label": "b", "children": []}]}})
    assert not valid({"city": 3}) and not valid({"name": "tree", "arguments": {"label": "a", "children": ["b"]}})
