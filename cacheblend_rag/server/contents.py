"""Reads what a request's messages say, apart from how the chat template writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.placing import Contents, search_content
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.tokens import TextEncoder

# Where messages, and the items of the Responses API, have text that somebody says.
_SAID = ("content", "output")


def with_texts(messages: Any, change: Callable[[str], str]) -> Any:
    """Return messages (or a text in place of them) with each text that they say changed, in order; all else stays."""
    if isinstance(messages, str):
        return change(messages)
    if isinstance(messages, list):
        return [with_texts(message, change) for message in messages]
    if not isinstance(messages, Mapping):
        return messages
    message: Mapping[str, Any] = messages
    said = {name: _said(message[name], change) for name in _SAID if message.get(name)}
    return {**message, **said}


def texts_in(messages: Any) -> list[str]:
    """Return the texts that messages say, in order."""
    texts: list[str] = []

    def read(text: str) -> str:
        texts.append(text)
        return text

    with_texts(messages, read)
    return texts


def _said(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if not isinstance(content, list):
        return content
    return [
        {**block, "text": change(block["text"])}
        if isinstance(block, Mapping) and isinstance(block.get("text"), str)
        else block
        for block in content
    ]


def search_contents(
    said: Sequence[Any], registry: ChunkRegistry, named: Sequence[Chunk], encoder: TextEncoder, most: int
) -> tuple[Contents, list[Any]] | None:
    """Search what messages say for chunks; None where nothing is found.

    Args:
        said: Each a list of messages or a text.
        registry: What is searched for.
        named: Chunks to look for first.
        encoder: Of the model's tokenizer.
        most: Characters that are searched; no more fit the context window.

    Returns:
        The contents, and ``said`` with their stand-ins.
    """
    texts = [text for each in said for text in texts_in(each)]
    if sum(map(len, texts)) > most:
        return None
    pieces = [search_content(text, registry, named, encoder) for text in texts]
    if not any(isinstance(piece, Chunk) for content in pieces for piece in content):
        return None
    contents = Contents(pieces)
    probes = iter(contents.probes)
    return contents, [with_texts(each, lambda _: next(probes)) for each in said]
