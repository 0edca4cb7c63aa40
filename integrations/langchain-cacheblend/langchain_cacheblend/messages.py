"""Converts LangChain's messages to the messages that `cacheblend_rag.chat_prompt` takes, and tool calls back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from cacheblend_rag import BlendEngine, Chunk, InputError
from cacheblend_rag.frameworks import CallsRead, chunk_of, new_call_id, openai_call

# Key for a model's reasoning in LangChain's own packages, in `AIMessage.content_blocks` and in chat templates.
_THOUGHTS = "reasoning_content"
# Blocks of an answer that repeat its `tool_calls`, or that templates leave out of the history.
_SILENT_BLOCKS = {
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "function_call",
    "input_json_delta",
    "thinking",
    "redacted_thinking",
    "reasoning",
}


def chat_messages(messages: Sequence[BaseMessage], engine: BlendEngine) -> list[dict[str, Any]]:
    """Return role, content, reasoning and tool calls of each message, with the chunks in its artifact.

    Raises:
        InputError: Models cannot read a message of this kind.
    """
    return [_convert(message, engine) for message in messages]


def thoughts(reasoning: str) -> dict[str, str]:
    """Return the additional fields for the message, or message chunk, of an answer with ``reasoning``."""
    return {_THOUGHTS: reasoning} if reasoning else {}


def _convert(message: BaseMessage, engine: BlendEngine) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _role(message), "content": _content(message)}
    if message.name:
        out["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        out["tool_calls"] = [openai_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    if isinstance(message, AIMessage) and isinstance(thought := message.additional_kwargs.get(_THOUGHTS), str):
        out[_THOUGHTS] = thought
    if isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
        out["named"] = _artifact_chunks(message.artifact, engine)
    return out


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kinds = ((SystemMessage, "system"), (HumanMessage, "user"), (AIMessage, "assistant"), (ToolMessage, "tool"))
    for kind, role in kinds:
        if isinstance(message, kind):
            return role
    if isinstance(message, FunctionMessage):
        return "tool"
    raise InputError(f"A {type(message).__name__} cannot be shown to a model; leave it out of the messages.")


def _content(message: BaseMessage) -> str | list[Any]:
    if isinstance(message.content, str):
        return message.content
    parts: list[Any] = []
    for block in message.content:
        if isinstance(block, dict) and isinstance(message, AIMessage) and block.get("type") in _SILENT_BLOCKS:
            continue
        if isinstance(block, dict) and set(block) == {"text"}:
            parts.append(block["text"])
        else:
            parts.append(block)
    return parts


def _artifact_chunks(artifact: Any, engine: BlendEngine) -> list[Chunk]:
    """Return the chunks of the documents that a retriever tool returned beside its text."""
    documents: Iterable[Any] = [artifact] if isinstance(artifact, Document) else artifact
    if not isinstance(documents, (list, tuple)):
        return []
    texts = [document.page_content for document in documents if isinstance(document, Document)]
    found = (chunk_of(text, engine.tokenizer, engine.registry) for text in texts)
    return [chunk for chunk in found if chunk is not None]


def tool_calls(read: CallsRead) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return the valid and the invalid calls of an answer."""
    calls = [tool_call(name=call.name, args=call.arguments, id=new_call_id()) for call in read.calls]
    return calls, [invalid_tool_call(name=None, args=text, id=new_call_id(), error=read.error) for text in read.invalid]


def tool_call_chunks(read: CallsRead) -> list[ToolCallChunk]:
    """Return the valid and invalid calls in the format of a stream's last chunk."""
    calls, invalid = tool_calls(read)
    spelled = [(one["name"], json.dumps(one["args"], ensure_ascii=False), one["id"]) for one in calls]
    spelled += [(one["name"] or "", _unreadable(one["args"] or ""), one["id"]) for one in invalid]
    return [tool_call_chunk(name=n, args=a, id=i, index=at) for at, (n, a, i) in enumerate(spelled)]


def _unreadable(arguments: str) -> str:
    """Return the arguments of an invalid call in a form that LangChain, which repairs partial JSON, does not accept."""
    try:
        mended = parse_partial_json(arguments)
    except ValueError:
        return arguments
    return json.dumps(arguments, ensure_ascii=False) if isinstance(mended, dict) else arguments
