"""Turns tool calls that were read off an answer into LangChain's form."""

from __future__ import annotations

import json

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from cacheblend_rag.frameworks import CallsRead, new_call_id


def tool_calls(read: CallsRead) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return the calls of an answer, and those that cannot be read."""
    calls = [tool_call(name=call.name, args=call.arguments, id=new_call_id()) for call in read.calls]
    return calls, [invalid_tool_call(name=None, args=text, id=new_call_id(), error=read.error) for text in read.invalid]


def tool_call_chunks(read: CallsRead) -> list[ToolCallChunk]:
    """Return both as the last piece of a stream has them."""
    calls, invalid = tool_calls(read)
    spelled = [(one["name"], json.dumps(one["args"], ensure_ascii=False), one["id"]) for one in calls]
    spelled += [(one["name"] or "", _unreadable(one["args"] or ""), one["id"]) for one in invalid]
    return [tool_call_chunk(name=n, args=a, id=i, index=at) for at, (n, a, i) in enumerate(spelled)]


def _unreadable(arguments: str) -> str:
    """Return the arguments of an invalid call so that LangChain, which mends half-written JSON, does not take them for valid."""
    try:
        mended = parse_partial_json(arguments)
    except ValueError:
        return arguments
    return json.dumps(arguments, ensure_ascii=False) if isinstance(mended, dict) else arguments
