"""Handles tool calls in LlamaIndex's form: the calls that a chat requires, and the calls of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms.llm import ToolSelection

from cacheblend_rag.frameworks import CallsRead, new_call_id, openai_call

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

_Response = TypeVar("_Response", ChatResponse, CompletionResponse)

CALLS = "tool_calls"
"""Key of `ChatMessage.additional_kwargs` for the calls of an answer, in OpenAI's form, with arguments as an object."""
INVALID = "invalid_tool_calls"
"""Key of `ChatMessage.additional_kwargs` for the texts of invalid calls."""


def chat_arguments(
    tools: Sequence[BaseTool],
    user_msg: str | ChatMessage | None,
    chat_history: Sequence[ChatMessage] | None,
    required: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a chat with tools."""
    asked = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
    messages = [*(chat_history or ()), *([] if asked is None else [asked])]
    specs = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
    given = {name: value for name, value in options.items() if name != "tool_choice" or value is not None}
    return {"messages": messages, "tools": specs, "tool_choice": "required" if required else "auto", **given}


def with_calls(response: _Response, read: CallsRead | None) -> _Response:
    """Put the calls of an answer into its message; a completion gets no calls."""
    if read is None or not isinstance(response, ChatResponse):
        return response
    kwargs = response.message.additional_kwargs
    if read.calls:
        kwargs[CALLS] = [openai_call(new_call_id(), call.name, call.arguments) for call in read.calls]
    if read.invalid:
        kwargs[INVALID] = list(read.invalid)
    return response


def selections(response: ChatResponse, must: bool) -> list[ToolSelection]:
    """Return the calls of an answer.

    Raises:
        ValueError: The answer has no call, and ``must`` is set; LlamaIndex's own programs expect this error.
    """
    kwargs = response.message.additional_kwargs
    found = [
        ToolSelection(tool_id=call["id"], tool_name=call["function"]["name"], tool_kwargs=call["function"]["arguments"])
        for call in kwargs.get(CALLS, ())
    ]
    if must and not found:
        broken = kwargs.get(INVALID)
        why = f"one that cannot be read, cut off perhaps: {broken[0]!r:.200}" if broken else "none"
        raise ValueError(f"The answer should call a tool, but has {why}.")
    return found
