"""Converts the tool calls parsed from an answer to LangChain's format."""

from __future__ import annotations

import json

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from cacheblend_rag.frameworks import CallsRead, new_call_id


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
