"""Finds the chunks that a request names (``chunk_ids``, a text block's id or ``cache_control``) or that its texts contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk, TextEncoder, checked_id, chunk_id, encoder_for, make_chunk
from cacheblend_rag.prompts.placing import Contents, search_content
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import SEPARATOR


class ChunkNaming:
    """Inserts the texts of named chunks where a request names them."""

    def __init__(self, tokenizer: Any, registry: ChunkRegistry, note: Callable[[Chunk], None]):
        """Look ids up in ``registry``; ``note`` is called with new chunks that come with a request."""
        self._tokenizer, self._registry, self._note = tokenizer, registry, note

    def messages(self, messages: Sequence[Any], chunk_ids: Sequence[str]) -> tuple[list[Any], tuple[str, ...]]:
        """Return messages without block ids and with the texts of all named chunks, and the ids of the named chunks.

        A text block with the id of a registered chunk and no text gets the chunk's text. A text block marked with
        ``cache_control`` is a chunk of its own. Chunks of ``chunk_ids`` whose text is in no message are put in front of the last
        user message.

        Raises:
            UnknownChunkError: An id names no chunk.
            InputError: There is no user message for ``chunk_ids``.
        """
        named = list(chunk_ids)
        found = [self._with_block_texts(message, named) for message in messages]
        absent = self._absent(chunk_ids, [_text_of(message) for message in found])
        if absent:
            message = next((message for message in reversed(found) if message.get("role") == "user"), None)
            if message is None:
                raise InputError("chunk_ids go in front of the last user message; there is no user message.")
            content, lead = message.get("content"), lead_text(absent)
            if isinstance(content, str):
                message["content"] = lead + content
            else:
                message["content"] = [{"type": "text", "text": lead}, *(content or ())]
        return found, tuple(named)

    def prompts(self, prompt: Any, chunk_ids: Sequence[str]) -> tuple[Any, list[list[Chunk]]]:
        """Return a prompt, or a list of prompts, with the absent chunks in front, and the chunks added to each prompt.

        Raises:
            UnknownChunkError: An id names no chunk.
            InputError: The prompt is not text.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
            raise InputError("chunk_ids need a prompt of text; for token ids give spans.")
        leads = [self._absent(chunk_ids, [text]) for text in prompts]
        joined = [lead_text(lead) + text for lead, text in zip(leads, prompts, strict=True)]
        return joined[0] if isinstance(prompt, str) else joined, leads

    def _with_block_texts(self, message: Any, named: list[str]) -> dict[str, Any]:
        copied: dict[str, Any] = dict(message)
        content = copied.get("content")
        if content is None or isinstance(content, str):
            return copied
        blocks = []
        for block in content:
            name = _name_of(block)
            if name is None:
                blocks.append(block)
                continue
            text = str(block.get("text") or "") or self._resolve(name).text
            said = text.strip()
            if self._registry.get(name) is None and said and name == chunk_id(said):  # not registered yet
                self._note(make_chunk(said, self._tokenizer))
            known = self._registry.get(name)
            if known is not None and known.text == said:
                named.append(name)
            kept = {key: value for key, value in block.items() if key not in {"id", "cache_control"}}
            blocks.append({**kept, "text": text})
        return {**copied, "content": blocks}

    def _absent(self, chunk_ids: Sequence[str], texts: Sequence[str]) -> list[Chunk]:
        return [chunk for chunk in self.resolved(chunk_ids) if not any(chunk.text in text for text in texts)]

    def resolved(self, chunk_ids: Iterable[str]) -> list[Chunk]:
        """Return the chunks of these ids.

        Raises:
            UnknownChunkError: An id names no chunk.
        """
        return [self._resolve(name) for name in chunk_ids]

    def _resolve(self, name: str) -> Chunk:
        chunk = self._registry.get(name)
        if chunk is None:
            raise UnknownChunkError(f"No chunk has the id {name!r}. Register its text with POST /v1/chunks first.")
        return chunk


def lead_text(chunks: Iterable[Chunk]) -> str:
    """Return the text that is put in front of a prompt for these chunks."""
    return "".join(f"{chunk.text}{SEPARATOR}" for chunk in chunks)


def tokens_match(tokenizer: Any, text: str, token_ids: tuple[int, ...]) -> bool:
    """Return whether ``token_ids`` are the tokens of ``text``, so that content matching cannot use other tokens' KV."""
    try:
        encoder = encoder_for(tokenizer)
        return text.strip() == text and list(token_ids) in (encoder.chunk(text)[0], encoder.document(text))
    except InputError:
        return False


def _name_of(block: Any) -> str | None:
    """Return the id of the chunk that a block names, or becomes by ``cache_control``; None for any other block."""
    if not isinstance(block, Mapping) or block.get("type") != "text":
        return None
    if block.get("id") is not None:
        return checked_id(str(block["id"]))
    text = str(block.get("text") or "").strip()
    return chunk_id(text) if text and block.get("cache_control") is not None else None


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    blocks = (block for block in content if isinstance(block, Mapping))
    return "\0".join(str(block.get("text", "")) for block in blocks)  # no chunk spans two blocks


# Fields of messages, and of items of the Responses API, that contain text.
_SAID = ("content", "output")


def with_texts(messages: Any, change: Callable[[str], str]) -> Any:
    """Return messages, or a text, with ``change`` applied to each text in order; all other fields stay."""
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
    """Return the texts of messages, in order."""
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
    """Search messages for chunks; None if nothing is found, or if the texts are too long and spell no special token.

    Each of ``said`` is a list of messages or a text. The ``named`` chunks are searched first. At most ``most`` characters are
    searched.

    Returns:
        The contents, and ``said`` with a stand-in for each text.

    Raises:
        InputError: The texts are too long to tell which of the special tokens spelled in them belong to a document.
    """
    texts = [text for each in said for text in texts_in(each)]
    if (length := sum(map(len, texts))) > most:
        if any(map(encoder.markers, texts)):
            raise InputError(
                f"The prompt has {length} characters, and spells special tokens. Of such no more than {most} are searched for "
                "registered chunks: send less."
            )
        return None
    pieces = [search_content(text, registry, named, encoder) for text in texts]
    if all(isinstance(piece, str) for content in pieces for piece in content):
        return None
    contents = Contents(pieces)
    probes = iter(contents.probes)
    return contents, [with_texts(each, lambda _: next(probes)) for each in said]
