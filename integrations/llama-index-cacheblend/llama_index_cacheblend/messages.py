"""LlamaIndex messages and prompts to `BlendPrompt`: explicit chunks first, then content match, then plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompt import BlendPrompt, ChunkRegistry, chat_prompt

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
CHUNK_IDS = "chunk_ids"
"""Key of `ChatMessage.additional_kwargs`, and call argument, that names the chunks a message or prompt holds."""


def named_chunks(engine: BlendEngine, ids: Sequence[str]) -> list[Chunk]:
    """Return the registered chunks with those ids.

    Raises:
        UnknownChunkError: The engine was never given one of them.
    """
    if isinstance(ids, str):
        raise InputError(f"{CHUNK_IDS} is the string {ids!r}; give a list of chunk ids.")
    found = []
    for one in ids:
        chunk = engine.registry.get(one)
        if chunk is None:
            raise UnknownChunkError(f"No chunk has the id {one!r}. Give it to precompute() or register_nodes() first.")
        found.append(chunk)
    return found


def prompt_of_messages(engine: BlendEngine, messages: Sequence[ChatMessage], explicit: Sequence[Chunk]) -> BlendPrompt:
    """Render a chat with the model's template and say where its chunks are.

    Args:
        engine: The model.
        messages: The chat. Text, citable and citation blocks are read, thinking and cache points are left out. Ids under
            ``additional_kwargs["chunk_ids"]`` name chunks of that message.
        explicit: Chunks known to stand somewhere in the chat; they are looked for before all others.

    Raises:
        InputError: A block that is not text, or messages the chat template refuses.
        UnknownChunkError: A message names a chunk that the engine does not know.
    """
    everywhere = ChunkRegistry(explicit) if explicit else None
    plain = [_plain_message(engine, message, explicit, everywhere) for message in messages]
    return chat_prompt(engine.tokenizer, plain, engine.registry)


def prompt_of_text(engine: BlendEngine, text: str, explicit: Sequence[Chunk]) -> BlendPrompt:
    """Return a prompt that is already formatted, with the chunks in it."""
    parts = _split(text, ChunkRegistry(explicit) if explicit else None)
    found = (engine.registry.find(part) if isinstance(part, str) else [part] for part in parts)
    return BlendPrompt(tuple(piece for pieces in found for piece in pieces))


def _plain_message(
    engine: BlendEngine, message: ChatMessage, explicit: Sequence[Chunk], everywhere: ChunkRegistry | None
) -> dict[str, Any]:
    named = message.additional_kwargs.get(CHUNK_IDS)
    chunks = ChunkRegistry([*named_chunks(engine, named), *explicit]) if named else everywhere
    plain: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role.value),
        "content": _split(_text_of(message.blocks, message.role), chunks),
    }
    calls: list[Any] = [block for block in message.blocks if block.block_type == "tool_call"]
    if calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": call.tool_name, "arguments": call.tool_kwargs}} for call in calls
        ]
    return plain


def _split(text: str, chunks: ChunkRegistry | None) -> list[str | Chunk]:
    return [text] if chunks is None else chunks.find(text)


def _text_of(blocks: Sequence[Any], role: MessageRole) -> str:
    texts = []
    for block in blocks:
        # By name, not by class: the lowest supported version has not got them all.
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
