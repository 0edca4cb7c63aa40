"""Builds the JSON schema of required tool calls, and parses the tool calls in an answer."""

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

_OPEN, _CLOSE, _FENCE = "<tool_call>", "</tool_call>", "```"
_DEFINED = re.compile(r"^#/(\$defs|definitions)/")
_JSON_FENCE = rf"{_FENCE}[\w-]*\s*"
_MARK = re.compile(rf"{_OPEN}|{_JSON_FENCE}[{{\[]")
_MARK_BEGUN = re.compile(rf"(?:`{{1,2}}|{_JSON_FENCE})\Z")
# A JSON string may contain a fence. An unclosed string ends with its line, or is still being written.
_STRING = r'"(?:[^"\\\n]|\\.)*+(?:"|\\?\Z)'
_PART = re.compile(
    rf"{_OPEN}(?P<block>.*?)(?:{_CLOSE}|\Z)"
    rf"|{_JSON_FENCE}(?P<fenced>[{{\[](?:{_STRING}|(?!{_FENCE}).)*+)(?:{_FENCE}|(?P<open>\Z))",
    re.DOTALL,
)


class ToolsAsked(NamedTuple):
    """Holds the tools that a prompt shows, and the required tool: a name, True for any tool, False for none."""

    specs: Sequence[Mapping[str, Any]] = ()
    required: str | bool = False


NO_TOOLS = ToolsAsked()


def tools_asked(tools: Sequence[Mapping[str, Any]], choice: Any) -> ToolsAsked:
    """Return the tools of a call by its ``tool_choice``; see :func:`required_tool`."""
    if choice == "none" or not tools:
        return NO_TOOLS
    return ToolsAsked(tools, required_tool(choice, tools))


def check_shown(engine: BlendEngine, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error if the model would never see the tools.

    Raises:
        InputError: The chat template does not show tools.
    """
    if tools and not reads_tools(engine.tokenizer):
        raise InputError(
            f"The chat template of {engine.fingerprint.name} does not show tools to the model, so it cannot call any. Use a "
            "model whose template does, or call it without tools."
        )


def required_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | bool:
    """Return which tool an answer must call: a name, True for any tool, False for none.

    Args:
        choice: OpenAI's ``tool_choice``, or another form that LangChain allows.
        tools: Tools in OpenAI's form.

    Raises:
        InputError: The choice has an unknown form, or names a tool that is not bound.
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
    """Return the JSON schema of a call of the ``required`` tool, True for any: an object with name and arguments.

    With an ``answer``, a value that conforms to the schema ``answer`` is valid as well.
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
    """Return a schema without its definitions, which move to ``definitions`` under names that begin with ``owner``."""
    left = dict(schema)
    for place in ("$defs", "definitions"):
        for name, definition in left.pop(place, {}).items():
            definitions[f"{owner}.{name}"] = _moved(definition, owner)
    moved: dict[str, Any] = _moved(left, owner)
    return moved


def _moved(schema: Any, owner: str) -> Any:
    """Return a schema whose references to an owner's definitions point to the places that :func:`_lifted` chose."""
    if isinstance(schema, Mapping):
        return {
            key: _DEFINED.sub(f"#/$defs/{owner}.", value)
            if key == "$ref" and isinstance(value, str)
            else _moved(value, owner)
            for key, value in schema.items()
        }
    return [_moved(item, owner) for item in schema] if isinstance(schema, list) else schema


class CallRead(NamedTuple):
    """Holds a call of a tool: its name and arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallsRead:
    """Holds the end of an answer: the rest of its text, its calls, its invalid calls, and why they cannot be read."""

    text: str
    calls: tuple[CallRead, ...] = ()
    invalid: tuple[str, ...] = ()
    error: str = ""


def new_call_id() -> str:
    """Return an id for a call: nine letters and digits, which Mistral's templates require and others accept."""
    return uuid4().hex[:9]


def openai_call(call_id: str | None, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's form, but with its arguments as an object, as chat templates read them."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class CallReader:
    r"""Separates the tool calls of an answer from its text, piece by piece.

    A call is a JSON object with the name of a bound tool and its arguments (``arguments``, or ``parameters`` as Llama 3
    writes them). Three forms are read: blocks ``<tool_call>{...}</tool_call>`` (Hermes, Qwen), fenced blocks
    (Qwen2.5-Coder), and an answer that is nothing but one such object, or a list of such objects (Llama 3, Mistral).
    JSON that calls no bound tool is text. A ``<tool_call>`` block that cannot be read is an invalid call. An answer
    that had to be a call and cannot be read is an invalid call, too, such as a required call that was cut off.

    Example:
        >>> tool = {"type": "function", "function": {"name": "now"}}
        >>> reader = CallReader([tool])
        >>> reader.push('I will look at the clock.\n```json\n{"name": "now", "arguments": {}}\n```')
        'I will look at the clock.\n'
        >>> reader.finish().calls
        (CallRead(name='now', arguments={}),)
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], required: str | bool = False):
        """Read calls of ``tools``; with ``required``, the whole answer is read as a call."""
        self._names = _names(tools)  # a list, because a model may give a name of any type
        self._required = self._held = required is not False
        self._text = ""
        self._sent = 0

    def push(self, piece: str) -> str:
        """Add the next piece of the answer; return the text that is certainly not part of a call."""
        self._text += piece
        if self._text.lstrip()[:1] in ("", "{", "["):
            return ""
        begun = self._sent
        while not self._held:
            mark = _MARK.search(self._text, self._sent)
            if mark is None:
                fence = _MARK_BEGUN.search(self._text, self._sent)
                self._sent = len(self._text) - begun_at_end(self._text[self._sent :], _OPEN)
                self._sent = self._sent if fence is None else fence.start()
                break
            self._sent = mark.start()
            part = _PART.match(self._text, self._sent)
            assert part is not None
            if part["open"] is not None:
                break
            self._held = part["block"] is not None or self._calls(part) is not None
            if not self._held:
                self._sent = part.end()
        return self._text[begun : self._sent]

    def finish(self) -> CallsRead:
        """Return the rest of the answer, with its calls, at the end of the answer."""
        whole = self._called(_json(self._text)) if self._sent == 0 else None
        if whole is not None:
            return CallsRead("", tuple(whole))
        rest, calls, invalid = self._text[self._sent :], list[CallRead](), list[str]()

        def take(part: re.Match[str]) -> str:
            found = self._calls(part)
            if found is None and part["block"] is None:
                return part[0]
            calls.extend(found or ())
            if found is None:
                invalid.append(part["block"].strip())
            return ""

        text = _PART.sub(take, rest)
        if self._required and not (calls or invalid):
            text, invalid = "", [rest.strip()]
        error = f"not a JSON object with the name of a bound tool and its arguments ({', '.join(sorted(self._names))})"
        return CallsRead(
            text.rstrip() if calls or invalid else text, tuple(calls), tuple(invalid), error if invalid else ""
        )

    def _calls(self, part: re.Match[str]) -> list[CallRead] | None:
        """Return the calls in a block, or None if the block holds anything else."""
        if part["fenced"] is None:
            return self._called(_json(part["block"]))
        body = _json(part["fenced"])
        # A model may show any JSON in a fence: an object with only a name is no call.
        items = body if isinstance(body, list) else [body]
        shaped = all(isinstance(item, dict) and ("arguments" in item or "parameters" in item) for item in items)
        return self._called(body) if shaped else None

    def _called(self, body: Any) -> list[CallRead] | None:
        """Return the calls in a JSON value that is a call or a list of calls, or None for any other value."""
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
    except (ValueError, RecursionError):  # a model that repeats itself may nest JSON without end
        return None
