"""Converts LlamaIndex messages to the messages that `cacheblend_rag.chat_prompt` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from cacheblend_rag import BlendEngine, Chunk, InputError
from cacheblend_rag.errors import UnknownChunkError
from cacheblend_rag.frameworks import openai_call
from llama_index_cacheblend.tools import CALLS

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
CHUNK_IDS = "chunk_ids"
"""Key in `ChatMessage.additional_kwargs`, and call argument, for the ids of the chunks in a message or prompt."""


def plain_message(engine: BlendEngine, message: ChatMessage) -> dict[str, Any]:
    """Return a message for :func:`~cacheblend_rag.chat_prompt`.

    The content is the text of text, citable and citation blocks. Cache points are left out. Thinking and tool calls are
    passed on for templates that read them. Ids under ``additional_kwargs["chunk_ids"]`` name chunks to search for
    first.

    Raises:
        InputError: A block is not text.
        UnknownChunkError: The engine does not know an id.
    """
    plain: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role.value),
        "content": _text_of(message.blocks, message.role),
        "named": _named(engine, message.additional_kwargs.get(CHUNK_IDS) or ()),
    }
    if (answered := message.additional_kwargs.get("tool_call_id")) is not None:
        plain["tool_call_id"] = answered
    if (made := message.additional_kwargs.get(CALLS)) is not None:
        plain["tool_calls"] = made
    thoughts = [block.content for block in message.blocks if block.block_type == "thinking" and block.content]
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    calls: list[Any] = [block for block in message.blocks if block.block_type == "tool_call"]
    if calls:
        plain["tool_calls"] = [openai_call(call.tool_call_id, call.tool_name, call.tool_kwargs) for call in calls]
    return plain


def checked_ids(ids: Any) -> Sequence[str]:
    """Return ``ids`` as a list; raise InputError for a string, which would be read letter by letter."""
    if isinstance(ids, str):
        raise InputError(f"{CHUNK_IDS} is the string {ids!r}; give a list of chunk ids.")
    return list(ids or ())


def _named(engine: BlendEngine, ids: Any) -> list[Chunk]:
    found = []
    for one in checked_ids(ids):
        chunk = engine.registry.get(one)
        if chunk is None:
            raise UnknownChunkError(f"No chunk has the id {one!r}. Give it to precompute() or register_nodes() first.")
        found.append(chunk)
    return found


def _text_of(blocks: Sequence[Any], role: MessageRole) -> str:
    texts = []
    for block in blocks:
        # By name, not by class: the lowest supported version lacks some of the classes.
        match block.block_type:
            case "text":
                texts.append(block.text)
            case "citable":
                texts.append(_text_of(block.content, role))
            case "citation":
                texts.append(_text_of([block.cited_content], role))
            case "thinking" | "cache" | "tool_call":
                pass
            case other:
                raise InputError(
                    f"A {role.value} message holds a block of kind {other!r}; this model reads text only. "
                    "Leave it out, or describe it in words."
                )
    return "\n".join(texts)
