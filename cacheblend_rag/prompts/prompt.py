"""Builds prompts of text and chunks with the model's chat template, and turns them into token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import EDGE, Chunk, PlainText, TextEncoder, chunk_id, encoder_for, make_chunk
from cacheblend_rag.prompts.placing import Contents, Piece, search_content, search_rendered, text_of
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import PROBE, SEPARATOR, at_once, render, render_probes

DEFAULT_INSTRUCTION = "Answer from the notes."

# What templates read of a model's message besides: those of models that go on thinking behind the answers of tools.
_THOUGHTS = "reasoning_content"


@dataclass(frozen=True)
class ChunkRef:
    """A reference to a chunk by id, resolved by the engine's registry."""

    id: str


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt as a sequence of text, chunks and chunk references.

    Special tokens spelled in the text segments are parsed (they come from chat templates); chunks never hold any, nor do
    segments of :class:`~cacheblend_rag.prompts.chunk.PlainText`.
    """

    segments: tuple[str | PlainText | Chunk | ChunkRef, ...]


@dataclass(frozen=True)
class ChunkSpan:
    """Says where a chunk stands in a tokenised prompt: positions ``start`` (inclusive) to ``end`` (exclusive)."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True)
class TokenizedPrompt:
    """A whole prompt as the model sees it.

    Attributes:
        token_ids: Its tokens.
        spans: The chunks in it, in ascending position, not overlapping.
        text: What it was made of, where that was a string without a known chunk: a server may know one.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]
    text: str | None = None


def tokenize(prompt: BlendPrompt, tokenizer: Any, registry: ChunkRegistry) -> TokenizedPrompt:
    """Return a prompt's tokens: the chunks' own, and between them those that the tokenizer gives where the text stands.

    They are those of the whole text in one piece, wherever the tokenizer cuts it at the chunks' edges (:func:`joins_are_plain`).
    The tokenizer's BOS comes first if it adds one by default and the prompt's first text does not begin with it already.

    Raises:
        UnknownChunkError: A reference to a chunk that ``registry`` does not hold.
    """
    return _tokenized([_resolve(segment, registry) for segment in prompt.segments], encoder_for(tokenizer))


def _tokenized(pieces: Sequence[Piece], encoder: TextEncoder, behind: str = "") -> TokenizedPrompt:
    """Tokenise pieces that stand before the text ``behind``."""
    token_ids: list[int] = []
    spans = []
    prefix = encoder.prefix_ids
    before = tail = ""  # what stands before a piece, and what of it has no tokens yet
    for index, piece in enumerate(pieces):
        if isinstance(piece, Chunk):
            ids: Sequence[int] = piece.token_ids
            token_ids += _ids("", encoder, before, tail, piece.text) if index else prefix
            spans.append(ChunkSpan(piece, len(token_ids), len(token_ids) + len(ids)))
            tail = encoder.tail(piece.text, ids)
            before = piece.text[: len(piece.text) - len(tail)]
        else:
            after = text_of(pieces[index + 1]) if index + 1 < len(pieces) else behind
            ids = _ids(piece, encoder, before, tail, after)
            if index == 0 and (not isinstance(piece, str) or tuple(ids[: len(prefix)]) != prefix):
                token_ids += prefix
            before, tail = text_of(piece), ""
        token_ids += ids
    token_ids += _ids("", encoder, before, tail, behind)
    return TokenizedPrompt(tuple(token_ids), tuple(spans))


def _ids(piece: str | PlainText, encoder: TextEncoder, before: str, tail: str, after: str) -> list[int]:
    """Return the tokens of a text behind the ``tail`` of a chunk, which are theirs, too."""
    if isinstance(piece, PlainText):
        return encoder.document(tail + piece.text)
    if not tail + piece:
        return []
    found = encoder.between(before[-EDGE:], tail + piece, after[:EDGE], len(tail))
    return [*encoder.document(tail), *encoder.template(piece)] if found is None else found


def header_ids(tokenizer: Any, header: str) -> tuple[int, ...]:
    """Return the token ids every prompt that begins with the text ``header`` begins with (BOS included)."""
    return _tokenized([header], encoder_for(tokenizer), "a").token_ids


Header = str | Sequence[int] | Callable[[Any], str]
"""What stands before the first chunk: the rendered text, its token ids, or what renders it for a tokenizer."""


def chosen_header_ids(tokenizer: Any, header: Header | None, blockwise: bool = False) -> tuple[int, ...]:
    """Return the tokens that an engine precomputes chunks behind: those of the given header, else of :func:`rag_header`'s.

    For a model that is ``blockwise`` (its profile says so) there are none, unless they are given.
    """
    if header is None:
        header = () if blockwise else rag_header
    if not isinstance(header, str) and not callable(header):
        return tuple(header)
    if tokenizer is None:
        return ()
    return header_ids(tokenizer, header if isinstance(header, str) else header(tokenizer))


def rag_header(tokenizer: Any, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """Return the rendered text that stands before the first chunk of :func:`rag_prompt`, whatever chunk and question."""
    messages = _rag_messages(instruction, [PROBE], "")
    rendered = render(tokenizer, _saying(messages, Contents([message["content"] for message in messages]).texts))
    header, found, _ = rendered.partition(PROBE)
    if not found:
        raise InputError(
            "The model's chat template leaves out or rewrites what the user says; chunks cannot be placed in it."
        )
    return header


def rag_prompt(
    tokenizer: Any,
    chunks: Sequence[Chunk],
    question: str,
    instruction: str = DEFAULT_INSTRUCTION,
    history: Sequence[tuple[str, str]] = (),
) -> BlendPrompt:
    """Return the RAG prompt: header, chunks, question.

    With a chat template the instruction is the system message, and chunks and question are the user's; without one the
    prompt reads ``{instruction}``, chunks, ``Question: {question}`` and ``Answer:``. Earlier questions and their answers
    (``history``, oldest first) stand between the chunks and the question, as turns of their own. Where the template has a
    switch for it (:func:`~cacheblend_rag.prompts.templates.at_once`), the model answers without thinking first.
    """
    messages = _rag_messages(instruction, chunks, question, history)
    prompt = _rendered(tokenizer, messages, ChunkRegistry(), variables=at_once(tokenizer))
    header = rag_header(tokenizer, instruction)
    first, *rest = prompt.segments
    if isinstance(first, str) and first != header and first.startswith(header):
        # Without chunks, too, the header is a segment of its own, so that its tokens are those KV was computed behind.
        return BlendPrompt((header, first[len(header) :], *rest))
    return prompt


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    registry: ChunkRegistry,
    *,
    chunk_ids: Iterable[str] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> BlendPrompt:
    """Render a chat with the model's template and say where its chunks are.

    Explicit references come first (parts with an id, ``named`` chunks, ``chunk_ids``), then registered chunks found by
    content, then plain text. A reference counts only where the chunk's exact text stands.

    Args:
        tokenizer: The model's tokenizer; its chat template is honoured, with the generation prompt added. Without one the
            messages are joined as in :func:`rag_prompt`.
        messages: ``role`` and ``content``, and whatever else the template reads. Content is a string, or a list of strings,
            chunks, chunk references and ``{"type": "text", "text": ...}`` parts; a part whose ``id`` is that of a
            registered chunk with that text, or the :func:`~cacheblend_rag.prompts.chunk.chunk_id` of its own text, is that
            chunk. Strings are searched for chunks. A message may have ``named``: chunks to look for in its content first,
            such as the documents a tool returned beside its text; templates do not see it. What a model thought
            (``reasoning_content``) they do not see where it spells special tokens: a document may have had it do so.
        registry: Chunks that may be named or found.
        chunk_ids: Registered chunks to look for first in all messages.
        tools: Functions in JSON-schema form for the template; see :func:`reads_tools`.
        chat_template_kwargs: What else the template reads, as ``{"enable_thinking": False}``.

    Raises:
        UnknownChunkError: A :class:`ChunkRef` or one of ``chunk_ids`` names a chunk that ``registry`` does not hold.
        InputError: The template refuses the messages, or content is neither text nor chunk.
    """
    everywhere = [_resolve(ChunkRef(name), registry) for name in dict.fromkeys(chunk_ids)]
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        parts = [content] if content is None or isinstance(content, str) else list(content)
        named = [*message.get("named", ()), *everywhere]
        pieces = [piece for part in parts for piece in _pieces(part, registry, tokenizer, named)]
        left_out = {"named"}
        if encoder_for(tokenizer).markers(str(message.get(_THOUGHTS) or "")):
            left_out.add(_THOUGHTS)
        found.append({**{k: v for k, v in message.items() if k not in left_out}, "content": pieces})
    return _rendered(tokenizer, found, registry, tools, chat_template_kwargs)


def text_prompt(tokenizer: Any, text: str, registry: ChunkRegistry, *, chunk_ids: Iterable[str] = ()) -> BlendPrompt:
    """Say where chunks stand in a prompt that is already rendered: those named first, then all that are registered.

    No chunk is found where a special token is spelled: the template's own cannot be told from those that a document spells.

    Raises:
        UnknownChunkError: One of ``chunk_ids`` names a chunk that ``registry`` does not hold.
    """
    named = [_resolve(ChunkRef(name), registry) for name in dict.fromkeys(chunk_ids)]
    return BlendPrompt(tuple(search_rendered(text, registry, named, encoder_for(tokenizer))))


def chunk_of(text: str, tokenizer: Any, registry: ChunkRegistry) -> Chunk | None:
    """Return the chunk with exactly that text but for outer whitespace: the registered one, else a new one.

    Returns None where there is no text. A new chunk is not registered: an engine does that when it computes its KV.
    """
    body = text.strip()
    return _referred(chunk_id(body), body, registry, tokenizer)


def _pieces(part: Any, registry: ChunkRegistry, tokenizer: Any, named: Sequence[Chunk]) -> list[Piece]:
    if part is None:
        return []
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        chunk = _referred(str(part.get("id")), text.strip(), registry, tokenizer)
        if chunk is not None:
            before, _, after = text.partition(chunk.text)
            pieces: list[Piece] = [before, chunk, after]
            return [piece for piece in pieces if piece]
        part = text
    if isinstance(part, str):
        return search_content(part, registry, named, encoder_for(tokenizer))
    if isinstance(part, (Chunk, ChunkRef)):
        return [_resolve(part, registry)]
    raise InputError(f"A message holds {part!r:.80}; only text and chunks can be read.")


def _referred(name: str, body: str, registry: ChunkRegistry, tokenizer: Any) -> Chunk | None:
    known = registry.get(name)
    if known is not None and known.text == body:
        return known
    return make_chunk(body, tokenizer) if body and name == chunk_id(body) else None


@overload
def _resolve(segment: Chunk | ChunkRef, registry: ChunkRegistry) -> Chunk: ...
@overload
def _resolve(segment: Piece | ChunkRef, registry: ChunkRegistry) -> Piece: ...
def _resolve(segment: Piece | ChunkRef, registry: ChunkRegistry) -> Piece:
    if not isinstance(segment, ChunkRef):
        return segment
    chunk = registry.get(segment.id)
    if chunk is None:
        raise UnknownChunkError(f"No chunk has the id {segment.id!r}. Give it to precompute() or the index first.")
    return chunk


def _rag_messages(
    instruction: str, chunks: Sequence[Piece], question: str, history: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return the messages of a RAG prompt, their contents in pieces."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": [instruction]}] if instruction else []
    before: list[Piece] = [piece for chunk in chunks for piece in (chunk, SEPARATOR)]
    for asked, answered in history:
        messages.append({"role": "user", "content": [*before, f"Question: {asked}"]})
        messages.append({"role": "assistant", "content": [answered]})
        before = []
    return [*messages, {"role": "user", "content": [*before, f"Question: {question}"]}]


def _rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    registry: ChunkRegistry,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> BlendPrompt:
    """Render messages with contents in pieces, and say where the pieces are."""
    contents = Contents([message["content"] for message in messages])
    rendered = render(tokenizer, _saying(messages, contents.texts), tools, variables)
    if all(isinstance(piece, str) for message in messages for piece in message["content"]):
        return BlendPrompt((rendered,) if rendered else ())
    skeleton = render_probes(tokenizer, _saying(messages, contents.probes), tools, variables)
    return BlendPrompt(tuple(contents.placed(rendered, skeleton, registry, encoder_for(tokenizer))))


def _saying(messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
