"""Splits documents into chunks, measured in tokens of the LLM."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, TextEncoder, chunk_id, encoder_for, pack_ids
from cacheblend_rag.retrieval.documents import Document

DEFAULT_CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS = 16
"""Minimum chunk size: a single character (18 letters after normalisation, or 4 bytes) may not fit a smaller chunk."""

_INK = re.compile(r"\S")
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")
_SENTENCE = re.compile(
    r"[.!?…]+[\"'”’»)\]*_]*(?=\s)"  # the end of a sentence, with closing quotes and brackets
    r"|[。！？｡]+[」』）】”’]*"  # languages without a space between sentences
    r"|\n(?=[^\S\n]*(?:[-*+•#|>]|\d{1,3}[.)])\s)"  # the end of a line before a list item, a table row or a heading
)
_LINE = re.compile(r"\n")
_WHOLE_LINE = re.compile(r"[^\n]+")
_SPACE = re.compile(r"\s")
_HEADING = re.compile(r"#{1,6}\s")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“])(?:[^\W\d_]|Dr|Mr|Mrs|Ms|St|Prof|Rev|Gen|Capt|No|vs|cf|e\.g|i\.e|approx|Fig)\.$"
)
_WINDOW_CHARS_PER_TOKEN = 64


def split_text(
    text: str,
    tokenizer: Any,
    max_tokens: int = DEFAULT_CHUNK_TOKENS,
    overlap: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> list[Chunk]:
    """Split ``text`` into chunks of at most ``max_tokens`` tokens, in time linear in its length.

    A chunk ends at the last paragraph edge in its second half, else at the last sentence edge in its second half, else
    at the last paragraph or sentence edge anywhere, else at a line end, else at whitespace, else between two tokens.
    With ``overlap=0`` the chunks contain the whole text except whitespace between chunks, and repeat nothing:
    ``text[c.metadata["start"]:c.metadata["end"]] == c.text``.

    Args:
        text: The text to split.
        tokenizer: Fast Hugging Face tokenizer of the LLM.
        max_tokens: Maximum number of tokens in a chunk; special tokens are neither counted nor added.
        overlap: Approximate number of tokens that a chunk repeats from the end of the previous chunk, beginning at a
            sentence or a word.
        metadata: Copied into every chunk, with ``start`` and ``end`` (character offsets) added.

    Raises:
        InputError: ``max_tokens`` or ``overlap`` is out of range, or the text is not valid Unicode.

    Example:
        Split a text into chunks of at most 256 tokens::

            chunks = split_text(text, engine.tokenizer, max_tokens=256, overlap=32)
            for chunk in chunks:
                print(chunk.metadata["start"], chunk.metadata["end"], chunk.text)
    """
    check_sizes(max_tokens, overlap)
    chunks = []
    for start, end, token_ids in _Splitter(text, encoder_for(tokenizer), max_tokens, overlap).pieces():
        body = text[start:end]
        chunks.append(Chunk(chunk_id(body), body, token_ids, {**(metadata or {}), "start": start, "end": end}))
    return chunks


def split_rows(
    text: str,
    head: str,
    tokenizer: Any,
    max_tokens: int = DEFAULT_CHUNK_TOKENS,
    metadata: Mapping[str, Any] | None = None,
) -> list[Chunk]:
    r"""Split a table with one row a line into chunks of at most ``max_tokens`` tokens: column names, then whole rows.

    If the second half of a chunk has neighbouring rows that differ in their first cell, the chunk ends between two such
    rows: rows about one thing stay together. Only a row that is too long for a chunk is cut. Each row stands in one
    chunk.
    ``text`` begins with the line ``head`` of column names, which may be empty; a ``head`` that fills half of a chunk
    begins only the first chunk. The other arguments, metadata and errors are those of :func:`split_text`.

    Example:
        >>> [chunk.text for chunk in split_rows("ship | cargo\nGull | grain\nTern | salt", "ship | cargo", tokenizer, 16)]
        ['ship | cargo\nGull | grain', 'ship | cargo\nTern | salt']
    """
    check_sizes(max_tokens, 0)
    encoder = encoder_for(tokenizer)
    front = f"{head}\n" if head else ""
    room = max_tokens - len(encoder.document(front))
    if room < max_tokens // 2:
        front, room = "", max_tokens
    rows = list(_rows(text, len(front), encoder, room))
    chunks, at = [], 0
    while at < len(rows):
        count = _rows_that_fit(rows, at, room)
        while True:
            start, end = rows[at].start, rows[at + count - 1].end
            token_ids, _ = encoder.chunk(body := front + text[start:end])
            if len(token_ids) <= max_tokens:
                break
            if count == 1:  # the row fits without the column names
                token_ids, _ = encoder.chunk(body := text[start:end])
                break
            count -= 1
        chunks.append(
            Chunk(chunk_id(body), body, pack_ids(token_ids), {**(metadata or {}), "start": start, "end": end})
        )
        at += count
    return chunks


class _Row(NamedTuple):
    """Holds a row, or a part of a row that is too long for a chunk: start and end offset, tokens, and first cell."""

    start: int
    end: int
    tokens: int
    first: str


def _rows(text: str, begin: int, encoder: TextEncoder, room: int) -> Iterator[_Row]:
    for line in _WHOLE_LINE.finditer(text, begin):
        row, first = line[0], line[0].partition(" | ")[0]
        tokens = len(encoder.chunk(row)[0])
        if tokens <= room:
            yield _Row(line.start(), line.end(), tokens, first)
            continue
        for start, end, token_ids in _Splitter(row, encoder, room, 0).pieces():
            yield _Row(line.start() + start, line.start() + end, len(token_ids), first)


def _rows_that_fit(rows: Sequence[_Row], at: int, room: int) -> int:
    """Return how many rows from ``at`` on go into one chunk: at least one."""
    count, left = 0, room
    while at + count < len(rows) and (not count or rows[at + count].tokens < left):
        left -= rows[at + count].tokens + 1  # one more token for the line end
        count += 1
    if at + count == len(rows):
        return count
    edges = (taken for taken in range(count, count // 2, -1) if rows[at + taken].first != rows[at + taken - 1].first)
    return next(edges, count)


def split_document(
    document: Document, tokenizer: Any, max_tokens: int = DEFAULT_CHUNK_TOKENS, overlap: int = 0
) -> list[Chunk]:
    """Split a table with :func:`split_rows`, and any other document with :func:`split_text`; raises their errors.

    The chunks have the document's metadata and, in a document with pages, their page numbers.
    """
    if document.head is not None:
        return split_rows(document.text, document.head, tokenizer, max_tokens, document.metadata)
    chunks = split_text(document.text, tokenizer, max_tokens, overlap, document.metadata)
    placed = ((chunk, document.pages(chunk.metadata["start"], chunk.metadata["end"])) for chunk in chunks)
    return [replace(c, metadata={**c.metadata, **pages}) if pages else c for c, pages in placed]


def check_sizes(max_tokens: int, overlap: int) -> None:
    """Raise InputError if a chunk size or an overlap is out of range."""
    if max_tokens < MIN_CHUNK_TOKENS:
        raise InputError(f"max_tokens is {max_tokens}; a chunk needs at least {MIN_CHUNK_TOKENS}.")
    if not 0 <= overlap <= max_tokens // 2:
        raise InputError(f"overlap is {overlap}; give 0 to half of max_tokens ({max_tokens // 2}).")


class _Splitter:
    def __init__(self, text: str, encoder: TextEncoder, max_tokens: int, overlap: int):
        self.text = text
        self.encoder = encoder
        self.max_tokens = max_tokens
        self.overlap = overlap
        self._chars_per_token = 4.0

    def pieces(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield the start offset, the end offset and the token ids of each chunk."""
        start = covered = 0
        while fresh := _INK.search(self.text, covered):
            ink = _INK.search(self.text, start, fresh.start())
            start = ink.start() if ink else fresh.start()
            starts, stop = self._window(start)
            fitted = self._fit(start, stop, starts, fresh.start())
            if fitted is None:  # the overlap leaves no room for new text, so the chunk begins without overlap
                start = fresh.start()
                continue
            covered, token_ids = fitted
            yield start, covered, token_ids
            start = self._next_start(covered, starts)

    def _window(self, start: int) -> tuple[list[int], int]:
        """Tokenise enough text from ``start`` for one chunk; return the tokens' start offsets and the window's end."""
        size = int(self._chars_per_token * self.max_tokens * 1.25) + 64
        widest = self.max_tokens * _WINDOW_CHARS_PER_TOKEN
        while True:
            stop = min(len(self.text), start + size)
            starts = self.encoder.document_starts(self.text[start:stop])
            if len(starts) > self.max_tokens or stop == len(self.text) or size >= widest:
                break
            size *= 2
        self._chars_per_token = max(0.25, (stop - start) / max(1, len(starts)))
        return [start + offset for offset in starts], stop

    def _fit(self, start: int, stop: int, starts: list[int], fresh: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the end and token ids of the chunk at ``start``, or None if it cannot reach beyond ``fresh``."""
        budget = min(self.max_tokens, len(starts))
        while budget > 0:
            high = max(starts[budget] if budget < len(starts) else stop, start + 1)
            if high <= fresh:
                return None
            end = high if high == len(self.text) else self._cut(high, starts[budget // 2], fresh)
            end = start + len(self.text[start:end].rstrip())
            token_ids, _ = self.encoder.chunk(self.text[start:end])
            if len(token_ids) <= self.max_tokens:
                return end, pack_ids(token_ids)
            # Tokens at the edges merge differently in a separate text, so only the chunk's own tokenisation decides.
            budget -= max(1, len(token_ids) - self.max_tokens)
        if fresh > start:
            return None
        raise InputError(
            f"The character at offset {start} alone takes more than {self.max_tokens} tokens; raise max_tokens."
        )

    def _cut(self, high: int, half: int, floor: int) -> int:
        """Return the best offset in ``(floor, high]`` at which to end a chunk."""
        paragraph, sentence = self._edge(_PARAGRAPH, floor, high), self._edge(_SENTENCE, floor, high)
        if max(paragraph, sentence) > floor:
            return paragraph if paragraph > max(half, floor) else max(paragraph, sentence)
        lines = [m.start() for m in _LINE.finditer(self.text, half, high) if m.start() > floor]
        if lines:
            return lines[-1]
        for at in range(high, floor, -1):
            if self.text[at].isspace():
                return at
        at = high
        while at > floor + 1 and _joined(self.text[at - 1], self.text[at]):
            at -= 1
        return at if at > floor + 1 else high

    def _edge(self, pattern: re.Pattern[str], floor: int, high: int) -> int:
        """Return the last edge that ``pattern`` finds in ``(floor, high]``, or ``floor``."""
        matches = list(pattern.finditer(self.text, floor, min(len(self.text), high + 32)))
        for match in reversed(matches):
            end = match.start() if match[0][0] == "\n" else match.end()
            if floor < end <= high and self._is_edge(match, end):
                return end
        return floor

    def _is_edge(self, match: re.Match[str], end: int) -> bool:
        if match[0][0] == "\n":  # a heading stays with the text below it
            line = self.text.rfind("\n", max(0, end - 200), end) + 1
            return not _HEADING.match(self.text, line)
        if match[0] != ".":
            return True
        following = _INK.search(self.text, end, end + 64)
        if following is not None and following[0].islower():
            return False
        return _ABBREVIATION.search(self.text[max(0, end - 12) : end]) is None

    def _next_start(self, end: int, starts: list[int]) -> int:
        count = bisect_left(starts, end)
        repeated = min(self.overlap, count // 2)
        want = starts[count - repeated] if repeated else end
        if want <= starts[0]:
            return end
        for pattern in (_SENTENCE, _SPACE):
            edge = pattern.search(self.text, want, end)
            if edge is not None:
                return edge.end()
        return want


def _joined(before: str, after: str) -> bool:
    """Return whether a reader sees two characters as one (combining marks, joined emoji)."""
    return unicodedata.category(after)[0] == "M" or "\u200d" in (before, after)
