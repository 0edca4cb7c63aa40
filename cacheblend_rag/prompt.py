"""Prompts made of text and chunks: built with the model's chat template, turned into token ids (issue 2, point 2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.registry import ChunkRegistry
from cacheblend_rag.tokens import encoder_for

__all__ = [
    "DEFAULT_INSTRUCTION",
    "BlendPrompt",
    "ChunkRef",
    "ChunkRegistry",
    "ChunkSpan",
    "TokenizedPrompt",
    "chat_prompt",
    "header_ids",
    "rag_header",
    "rag_prompt",
    "tokenize",
]

DEFAULT_INSTRUCTION = "Answer from the notes."

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% elif m['role'] == 'user' %}{{ m['content'] }}\nAnswer:"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For models without a chat template: instruction, chunks, question and ``Answer:``, a blank line between each."""

_SEPARATOR = "\n\n"
_PROBE = "cacheblend-probe-7f3a"
# Templates that print today's date would give every chunk's KV a header that is out of date tomorrow.
_FIXED_DATE = datetime(2024, 7, 26)
_TODAY = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True)
class ChunkRef:
    """A reference to a chunk by id, resolved by the engine's registry."""

    id: str


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt as a sequence of text, chunks and chunk references.

    Special tokens spelled in the text segments are parsed (they come from chat templates); chunks never hold any.
    """

    segments: tuple[str | Chunk | ChunkRef, ...]


@dataclass(frozen=True)
class ChunkSpan:
    """Where a chunk stands in a tokenised prompt: positions ``start`` (inclusive) to ``end`` (exclusive)."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids of a whole prompt and the chunks in it, in ascending position, not overlapping."""

    token_ids: tuple[int, ...]
    spans: tuple[ChunkSpan, ...]


def tokenize(prompt: BlendPrompt, tokenizer: Any, registry: ChunkRegistry) -> TokenizedPrompt:
    """Tokenise each text segment on its own and concatenate token ids; chunks bring theirs.

    The tokenizer's BOS comes first if it adds one by default and the prompt's first text does not begin with it already.

    Raises:
        UnknownChunkError: A reference to a chunk that ``registry`` does not hold.
    """
    encoder = encoder_for(tokenizer)
    pieces = [_resolve(segment, registry) for segment in prompt.segments]
    first = encoder.template(pieces[0]) if pieces and isinstance(pieces[0], str) else []
    prefix = encoder.prefix_ids
    token_ids = list(prefix if pieces and tuple(first[: len(prefix)]) != prefix else ())
    spans = []
    for piece in pieces:
        begin = len(token_ids)
        if isinstance(piece, Chunk):
            token_ids.extend(piece.token_ids)
            spans.append(ChunkSpan(piece, begin, len(token_ids)))
        else:
            token_ids.extend(encoder.template(piece))
    return TokenizedPrompt(tuple(token_ids), tuple(spans))


def header_ids(tokenizer: Any, header: str) -> tuple[int, ...]:
    """Return the token ids every prompt that begins with the text ``header`` begins with (BOS included)."""
    return tokenize(BlendPrompt((header,)), tokenizer, ChunkRegistry()).token_ids


def rag_header(tokenizer: Any, instruction: str = DEFAULT_INSTRUCTION) -> str:
    """Return the rendered text that stands before the first chunk of :func:`rag_prompt`, whatever chunk and question."""
    rendered = _render(tokenizer, _rag_messages(instruction, [_PROBE], ""))
    header, found, _ = rendered.partition(_PROBE)
    if not found:
        raise InputError(
            "The model's chat template leaves out or rewrites what the user says; chunks cannot be placed in it."
        )
    return header


def rag_prompt(
    tokenizer: Any, chunks: Sequence[Chunk], question: str, instruction: str = DEFAULT_INSTRUCTION
) -> BlendPrompt:
    """Return the RAG prompt: header, chunks, question.

    With a chat template the instruction is the system message, and chunks and question are the user's; without one the
    prompt reads ``{instruction}``, chunks, ``Question: {question}`` and ``Answer:``.
    """
    messages = _rag_messages(instruction, [chunk.text for chunk in chunks], question)
    prompt = _locate(_render(tokenizer, messages), chunks)
    header = rag_header(tokenizer, instruction)
    first, *rest = prompt.segments
    if isinstance(first, str) and first != header and first.startswith(header):
        # Without chunks, too, the header is a segment of its own, so that its tokens are those KV was computed behind.
        return BlendPrompt((header, first[len(header) :], *rest))
    return prompt


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], registry: ChunkRegistry) -> BlendPrompt:
    """Render a chat with the model's template and say where its chunks are.

    Args:
        tokenizer: The model's tokenizer; its chat template is honoured, with the generation prompt added. Without one the
            messages are joined as in :func:`rag_prompt`.
        messages: ``role`` and ``content``, and whatever else the template reads. Content is a string, or a list of strings,
            chunks, chunk references and ``{"type": "text", "text": ...}`` parts; a part whose ``id`` is that of a
            registered chunk with that text is that chunk. Strings are searched for registered chunks.
        registry: Chunks that may be named or found.

    Raises:
        UnknownChunkError: A :class:`ChunkRef` to a chunk that ``registry`` does not hold.
        InputError: The template refuses the messages, or content is neither text nor chunk.
    """
    plain: list[dict[str, Any]] = []
    chunks: list[Chunk] = []
    for message in messages:
        content = message.get("content")
        parts = [content] if content is None or isinstance(content, str) else list(content)
        texts = []
        for part in parts:
            for piece in _pieces(part, registry):
                if isinstance(piece, Chunk):
                    chunks.append(piece)
                texts.append(piece.text if isinstance(piece, Chunk) else piece)
        plain.append({**message, "content": "".join(texts)})
    return _locate(_render(tokenizer, plain), chunks)


def _pieces(part: Any, registry: ChunkRegistry) -> list[str | Chunk]:
    if part is None:
        return []
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        known = registry.get(str(part.get("id")))
        if known is not None and known.text == part["text"].strip():
            return [known]
        part = part["text"]
    if isinstance(part, str):
        return registry.find(part)
    if isinstance(part, (Chunk, ChunkRef)):
        return [_resolve(part, registry)]
    raise InputError(f"A message holds {part!r:.80}; only text and chunks can be read.")


def _resolve(segment: str | Chunk | ChunkRef, registry: ChunkRegistry) -> str | Chunk:
    if not isinstance(segment, ChunkRef):
        return segment
    chunk = registry.get(segment.id)
    if chunk is None:
        raise UnknownChunkError(f"No chunk has the id {segment.id!r}. Give it to precompute() or the index first.")
    return chunk


def _rag_messages(instruction: str, texts: Sequence[str], question: str) -> list[dict[str, Any]]:
    user = _SEPARATOR.join([*texts, f"Question: {question}"])
    system = [{"role": "system", "content": instruction}] if instruction else []
    return [*system, {"role": "user", "content": user}]


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    """Render with the generation prompt; system messages go into the next user turn if the template has no system role."""
    system = [message["content"].strip() for message in messages if message["role"] == "system"]
    refusal: TemplateError | None = None
    try:
        rendered = _apply(tokenizer, messages)
        if all(text in rendered for text in system):
            return rendered
    except TemplateError as error:
        refusal = error
    if system:
        try:
            return _apply(tokenizer, _without_system(messages))
        except TemplateError as error:
            refusal = error
    raise InputError(f"The model's chat template refuses these messages: {refusal}.") from refusal


def _apply(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    template = getattr(tokenizer, "chat_template", None) or PLAIN_TEMPLATE
    if isinstance(template, str):
        # Written into the template: newer versions of transformers hand it plain data only, no functions.
        template = _TODAY.sub(lambda call: repr(_FIXED_DATE.strftime(call[2])), template)
    return str(
        tokenizer.apply_chat_template(
            list(messages),
            chat_template=template if isinstance(template, str) else None,
            add_generation_prompt=True,
            tokenize=False,
        )
    )


def _without_system(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            merged.append({**message, "content": _SEPARATOR.join([*waiting, message["content"]])})
            waiting = []
        else:
            merged.append(message)
    if waiting:
        merged.append({"role": "user", "content": _SEPARATOR.join(waiting)})
    return merged


def _locate(rendered: str, chunks: Iterable[Chunk]) -> BlendPrompt:
    """Find the chunks in the rendered text, in order; what a template has rewritten stays text."""
    segments: list[str | Chunk | ChunkRef] = []
    end = 0
    for chunk in chunks:
        at = rendered.find(chunk.text, end)
        if at < 0:
            continue
        if at > end:
            segments.append(rendered[end:at])
        segments.append(chunk)
        end = at + len(chunk.text)
    if end < len(rendered):
        segments.append(rendered[end:])
    return BlendPrompt(tuple(segments))
