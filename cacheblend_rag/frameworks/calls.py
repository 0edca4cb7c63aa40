"""Says which tools an answer must call, as a JSON schema, and reads the calls of tools off an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from cacheblend_rag.engines.sampling import begun_at_end
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.templates import reads_tools

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DEFINED = re.compile(r"^#/(\$defs|definitions)/")
_BLOCK = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)


class ToolsAsked(NamedTuple):
    """Holds the tools that a prompt shows, and which one its answer must call: a name, True for any, False for none."""

    specs: Sequence[Mapping[str, Any]] = ()
    required: str | bool = False


NO_TOOLS = ToolsAsked()


def tools_asked(tools: Sequence[Mapping[str, Any]], choice: Any) -> ToolsAsked:
    """Return the tools of a call by its ``tool_choice``; see :func:`required_tool`."""
    if choice == "none" or not tools:
        return NO_TOOLS
    return ToolsAsked(tools, required_tool(choice, tools))


def check_shown(engine: BlendEngine, tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools that the model would never see.

    Raises:
        InputError: The chat template does not show tools.
    """
    if tools and not reads_tools(engine.tokenizer):
        raise InputError(
            f"The chat template of {engine.fingerprint.name} does not show tools to the model, so it cannot call any. Use a "
            "model whose template does, or call it without tools."
        )


def required_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | bool:
    """Say which tool an answer must call: a name, True for any one, False for none.

    Args:
        choice: OpenAI's ``tool_choice``, with what LangChain allows beside it.
        tools: Tools in OpenAI's form.

    Raises:
        InputError: A choice of no known form, or of a tool that is not bound.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name")
    if choice in (None, False, "auto", "none"):
        return False
    if choice in (True, "any", "required"):
        return True
    names = _names(tools)
    if choice not in names:
        raise InputError(
            f"tool_choice is {choice!r}; give 'auto', 'any', 'none' or one of {', '.join(names) or '(no tools)'}."
        )
    return str(choice)


def call_schema(
    tools: Sequence[Mapping[str, Any]], required: str | bool, answer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON schema of a call of the ``required`` tool, True for any: an object with ``name`` and ``arguments``.

    With an ``answer`` what conforms to that schema will do as well.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for function in (tool["function"] for tool in tools):
        if required is not True and function["name"] != required:
            continue
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": _lifted(parameters, function["name"], definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    if answer is not None:
        calls.append(_lifted(answer, "", definitions))
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _lifted(schema: Mapping[str, Any], owner: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without its definitions, which are put into ``definitions`` under names of their owner's own."""
    left = dict(schema)
    for place in ("$defs", "definitions"):
        for name, definition in left.pop(place, {}).items():
            definitions[f"{owner}.{name}"] = _moved(definition, owner)
    moved: dict[str, Any] = _moved(left, owner)
    return moved


def _moved(schema: Any, owner: str) -> Any:
    """Let references to an owner's definitions point to where :func:`_lifted` puts them."""
    if isinstance(schema, Mapping):
        return {
            key: _DEFINED.sub(f"#/$defs/{owner}.", value)
            if key == "$ref" and isinstance(value, str)
            else _moved(value, owner)
            for key, value in schema.items()
        }
    return [_moved(item, owner) for item in schema] if isinstance(schema, list) else schema


class CallRead(NamedTuple):
    """A call of a tool: its name and arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallsRead:
    """Holds what stands at an answer's end: the rest of its text, its calls, what should be one, and why it cannot be read."""

    text: str
    calls: tuple[CallRead, ...] = ()
    invalid: tuple[str, ...] = ()
    error: str = ""


def new_call_id() -> str:
    """Return an id for a call: nine letters and digits, as the templates of Mistral's models want it and no other minds."""
    return uuid4().hex[:9]


class CallReader:
    """Separates the tool calls of an answer from its text, piece by piece.

    Two forms are read: blocks ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen), and an answer that
    is nothing but one such JSON object, or a list of them (Llama 3, Mistral; ``parameters`` for ``arguments``). JSON that is
    no call of a bound tool is text; a block that cannot be read is an invalid call, and so is an answer that had to be one: a
    forced call that was cut off, say.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], required: str | bool = False):
        """Read calls of ``tools``; with ``required`` the answer is known to be one."""
        self._names = _names(tools)  # a list: what a model calls a name may be anything
        self._required = self._held = required is not False
        self._text = ""
        self._sent = 0

    def push(self, piece: str) -> str:
        """Take the next piece of the answer; return the text that is certainly not part of a call."""
        self._text += piece
        if self._held or self._text.lstrip()[:1] in ("", "{", "["):
            return ""
        start = self._text.find(_OPEN, self._sent)
        if start >= 0:
            self._held = True
        else:
            start = len(self._text) - begun_at_end(self._text, _OPEN)
        released = self._text[self._sent : start]
        self._sent = max(self._sent, start)
        return released

    def finish(self) -> CallsRead:
        """Return what is left of the answer, at its end."""
        rest = self._text[self._sent :]
        whole = self._whole()
        if whole is not None:
            return CallsRead("", tuple(whole))
        calls: list[CallRead] = []
        invalid: list[str] = []
        for block in _BLOCK.findall(rest):
            call = self._call(_json(block))
            if call is None:
                invalid.append(block.strip())
            else:
                calls.append(call)
        text = _BLOCK.sub("", rest)
        if self._required and not (calls or invalid):
            text, invalid = "", [rest.strip()]
        error = f"not a JSON object with the name of a bound tool and its arguments ({', '.join(sorted(self._names))})"
        return CallsRead(
            text.rstrip() if calls or invalid else text, tuple(calls), tuple(invalid), error if invalid else ""
        )

    def _whole(self) -> list[CallRead] | None:
        body = _json(self._text) if self._sent == 0 else None
        items = body if isinstance(body, list) else [body]
        calls = [call for item in items if (call := self._call(item)) is not None]
        return calls if calls and len(calls) == len(items) else None

    def _call(self, item: Any) -> CallRead | None:
        if not isinstance(item, dict) or item.get("name") not in self._names:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments)
        return CallRead(item["name"], arguments) if isinstance(arguments, dict) else None


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a model that repeats itself may nest without end
        return None
