"""Builds prompts from text and chunks with the model's chat template, and encodes prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import EDGE, Chunk, PlainText, TextEncoder, chunk_id, encoder_for, make_chunk
from cacheblend_rag.prompts.placing import Contents, Piece, search_content, search_rendered, text_of
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import PROBE, SEPARATOR, at_once, render

DEFAULT_INSTRUCTION = "Answer from the notes."

# Further field of a model's message, for templates of models that continue to think after the results of tools.
_THOUGHTS = "reasoning_content"


@dataclass(frozen=True)
class ChunkRef:
    """Refers to a chunk by id, to be resolved by the engine's registry."""

    id: str


@dataclass(frozen=True)
class BlendPrompt:
    """Holds a prompt as a sequence of texts, chunks and chunk references.

    Special tokens spelled in text segments are parsed (text segments come from chat templates). Special tokens spelled
    in chunks and in segments of :class:`~cacheblend_rag.prompts.chunk.PlainText` are never parsed.

    Example::

        prompt = BlendPrompt(("Answer from the notes. ", chunk, " Question: When did the Gull sail? Answer:"))
        print(engine.generate(prompt).text)
    """

    segments: tuple[str | PlainText | Chunk | ChunkRef, ...]


@dataclass(frozen=True)
class ChunkSpan:
    """Places a chunk in a tokenised prompt: positions ``start`` (inclusive) to ``end`` (exclusive)."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True)
class TokenizedPrompt:
    """Holds a whole prompt as the model sees the prompt.

    Attributes:
        token_ids: Token ids of the prompt.
        spans: Chunks in the prompt, in ascending position, not overlapping.
        text: Source text, if the prompt was a string without a known chunk: a server may know chunks in the text.
    """

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]
    text: str | None = None


def tokenize(prompt: BlendPrompt, tokenizer: Any, registry: ChunkRegistry) -> TokenizedPrompt:
    """Return a prompt's tokens: the stored tokens of the chunks, and between chunks the text encoded in its context.

    The tokens equal those of the whole text in one piece, wherever the tokenizer splits the text at the chunks' edges
    (:func:`~cacheblend_rag.calibrate.diagnose.joins_are_plain`). The result begins with the tokenizer's BOS, if the
    tokenizer adds a BOS by default.

    Raises:
        UnknownChunkError: The prompt refers to a chunk that ``registry`` does not hold.
    """
    pieces = [_registered(each.id, registry) if isinstance(each, ChunkRef) else each for each in prompt.segments]
    return _tokenized(pieces, encoder_for(tokenizer))


def _tokenized(pieces: Sequence[Piece], encoder: TextEncoder, behind: str = "") -> TokenizedPrompt:
    """Tokenise pieces that the text ``behind`` will follow."""
    token_ids: list[int] = []
    spans = []
    prefix = encoder.prefix_ids
    before = tail = ""  # the text before a piece, and the end of that text that has no tokens yet
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
    """Encode the ``tail`` of a chunk and the text ``piece`` behind it, between the texts ``before`` and ``after``."""
    if isinstance(piece, PlainText):
        return encoder.document(tail + piece.text)
    if not tail + piece:
        return []
    found = encoder.between(before[-EDGE:], tail + piece, after[:EDGE], len(tail))
    return [*encoder.document(tail), *encoder.template(piece)] if found is None else found


def header_ids(tokenizer: Any, header: str) -> tuple[int, ...]:
    """Return the token ids, BOS included, at the beginning of every prompt that begins with the text ``header``."""
    return _tokenized([header], encoder_for(tokenizer), "a").token_ids


Header = str | Sequence[int] | Callable[[Any], str]
"""Header before the first chunk: the rendered text, its token ids, or a function that renders it for a tokenizer."""


def chosen_header_ids(tokenizer: Any, header: Header | None, blockwise: bool = False) -> tuple[int, ...]:
    """Return the tokens behind which an engine precomputes chunks: the tokens of ``header``, or of :func:`rag_header`.

    Without ``header``, a ``blockwise`` model (a setting of the model's profile) has no header tokens.
    """
    if header is None:
        header = () if blockwise else rag_header
    if not isinstance(header, str) and not callable(header):
        return tuple(header)
    if tokenizer is None:
        return ()
    return header_ids(tokenizer, header if isinstance(header, str) else header(tokenizer))


def rag_header(tokenizer: Any, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """Return the rendered text before the first chunk of :func:`rag_prompt`, equal for all chunks and questions."""
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

    With a chat template the instruction is the system message, and chunks and question are the user message. Without a
    chat template the prompt is ``{instruction}``, chunks, ``Question: {question}`` and ``Answer:``. Earlier questions
    and their answers (``history``, oldest first) come between the chunks and the question, each as a turn. If the
    template can switch thinking off (:func:`~cacheblend_rag.prompts.templates.at_once`), the model answers without
    thinking first.
    """
    messages = _rag_messages(instruction, chunks, question, history)
    prompt = _rendered(tokenizer, messages, ChunkRegistry(), variables=at_once(tokenizer))
    if chunks and chunks[0] in prompt.segments[:2]:
        return prompt
    header = rag_header(tokenizer, instruction)  # a second rendering: no chunk shows where the header ends
    first, *rest = prompt.segments
    if isinstance(first, str) and first.startswith(header):
        # The header is always a separate segment, so that its tokens are the tokens behind which the KV was computed.
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
    """Render a chat with the model's template, and locate the chunks in the rendered text.

    Explicit references come first (parts with an id, ``named`` chunks, ``chunk_ids``), then registered chunks found by
    content, then plain text. A reference counts only if the prompt has the chunk's exact text.

    Args:
        tokenizer: The model's tokenizer. Its chat template renders the messages and adds the generation prompt. Without
            a chat template the messages are joined as in :func:`rag_prompt`.
        messages: Messages with ``role``, ``content`` and further fields that the template reads. Content is a string,
            or a list of strings, chunks, chunk references and ``{"type": "text", "text": ...}`` parts. A part is a
            chunk if its ``id`` is the id of a registered chunk with the same text, or the
            :func:`~cacheblend_rag.prompts.chunk.chunk_id` of its own text. Strings are searched for chunks. A message
            may have ``named``: chunks to look for in its content first, such as the documents that a tool returned
            beside its text; templates do not see ``named``. Templates do not see a model's thoughts
            (``reasoning_content``) that spell special tokens, because a document may have caused the spelling.
        registry: Chunks that may be named or found.
        chunk_ids: Ids of registered chunks to look for first in all messages.
        tools: Functions in JSON-schema form for the template; see :func:`reads_tools`.
        chat_template_kwargs: Further variables for the template, as ``{"enable_thinking": False}``.

    Raises:
        UnknownChunkError: A :class:`ChunkRef` or one of ``chunk_ids`` names a chunk that ``registry`` does not hold.
        InputError: The template refuses the messages, or content is neither text nor chunk.

    Example::

        messages = [{"role": "user", "content": [chunk, "When did the Gull sail?"]}]
        prompt = chat_prompt(engine.tokenizer, messages, engine.registry)
        answer = engine.generate(prompt)
    """
    everywhere = [_registered(name, registry) for name in dict.fromkeys(chunk_ids)]
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
    """Locate chunks in a rendered prompt: first the chunks of ``chunk_ids``, then all registered chunks.

    No chunk is found over a spelled special token, because the template's special tokens look like those in a document.

    Raises:
        UnknownChunkError: One of ``chunk_ids`` names a chunk that ``registry`` does not hold.

    Example::

        prompt = text_prompt(engine.tokenizer, rendered, engine.registry)
        answer = engine.generate(prompt)
    """
    named = [_registered(name, registry) for name in dict.fromkeys(chunk_ids)]
    return BlendPrompt(tuple(search_rendered(text, registry, named, encoder_for(tokenizer))))


def chunk_of(text: str, tokenizer: Any, registry: ChunkRegistry) -> Chunk | None:
    """Return the registered or else a new chunk of ``text`` without outer whitespace; None for whitespace alone."""
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
            return [before, chunk, after]
        part = text
    if isinstance(part, str):
        return search_content(part, registry, named, encoder_for(tokenizer))
    if isinstance(part, (Chunk, ChunkRef)):
        return [part if isinstance(part, Chunk) else _registered(part.id, registry)]
    raise InputError(f"A message holds {part!r:.80}; only text and chunks can be read.")


def _referred(name: str, body: str, registry: ChunkRegistry, tokenizer: Any) -> Chunk | None:
    known = registry.get(name)
    if known is not None and known.text == body:
        return known
    return make_chunk(body, tokenizer) if body and name == chunk_id(body) else None


def _registered(name: str, registry: ChunkRegistry) -> Chunk:
    chunk = registry.get(name)
    if chunk is None:
        raise UnknownChunkError(f"No chunk has the id {name!r}. Give it to precompute() or the index first.")
    return chunk


def _rag_messages(
    instruction: str, chunks: Sequence[Piece], question: str, history: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Return the messages of a RAG prompt, with contents split into pieces."""
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
    """Render messages whose contents are split into pieces, and locate the pieces in the rendered text."""
    contents = Contents([message["content"] for message in messages])
    rendered = render(tokenizer, _saying(messages, contents.texts), tools, variables)
    if all(isinstance(piece, str) for message in messages for piece in message["content"]):
        return BlendPrompt((rendered,) if rendered else ())
    encoder = encoder_for(tokenizer)
    if (pieces := contents.found_in(rendered, encoder)) is None:
        try:
            skeleton = render(tokenizer, _saying(messages, contents.probes), tools, variables)
        except InputError:  # the template depends on the texts
            skeleton = ""
        pieces = contents.placed(rendered, skeleton, registry, encoder)
    return BlendPrompt(tuple(pieces))


def _saying(messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]
