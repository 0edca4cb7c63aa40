"""Locates known chunks in a rendered prompt: in the text of users and documents, never in the template's text.

The search runs on each message's content before rendering. In most prompts, the contents with chunks can stand in one
way only in the rendered text, which the text itself shows. In the other prompts, a template has rewritten a content or
may itself have written the same text, or a chunk spells special tokens. Then the messages are rendered a second time
with a probe in place of each content. Text between the probes is the template's text, and the text in place of a probe
is the content, unless the template has rewritten the content. Some templates write a content inside a JSON string, as
Llama 3's templates do with the result of a tool. Then the chunk is the registered chunk of the escaped text, if there
is one.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from secrets import token_hex

from cacheblend_rag.prompts.chunk import Chunk, PlainText, TextEncoder, chunk_id
from cacheblend_rag.prompts.matching import Range
from cacheblend_rag.prompts.registry import MATCH_WINDOW, ChunkRegistry
from cacheblend_rag.prompts.templates import PROBE

Piece = str | PlainText | Chunk

_position: Callable[[tuple[int, Piece]], int] = itemgetter(0)
_begin: Callable[[Range], int] = itemgetter(0)
_end: Callable[[Range], int] = itemgetter(1)
_PROBE = f"{PROBE}-{token_hex(8)}-"  # random in each process, so that no document can contain the probe


def search_content(text: str, registry: ChunkRegistry, named: Sequence[Chunk], encoder: TextEncoder) -> list[Piece]:
    """Split a message's content into text and chunks: each ``named`` chunk once, in order, then all registered chunks.

    A known chunk's text is data, even if another chunk overlaps it. If a chunk takes a part of the text, the rest
    becomes :class:`~cacheblend_rag.prompts.chunk.PlainText` where it spells special tokens.
    """
    places = _places(text, registry, named, [])
    gaps = _gaps(places, len(text))
    markers = [(begin + a, begin + b) for begin, end in gaps for a, b in encoder.markers(text[begin:end])]
    data: list[Range] = []
    if markers:
        known = (registry, ChunkRegistry(named))
        data = _merged(
            [*_short_over(text, named, markers), *(at for each in known for at in each.covering(text, markers))]
        )
    pieces: list[tuple[int, Piece]] = list(places)
    for begin, end in gaps:
        at = begin
        for number in range(bisect_right(data, begin, key=_end), bisect_left(data, end, key=_begin)):
            start, stop = max(at, data[number][0]), min(end, data[number][1])
            pieces += [(at, text[at:start]), (start, PlainText(text[start:stop]))]
            at = stop
        pieces.append((at, text[at:end]))
    return _joined(piece for _, piece in sorted(pieces, key=_position))


def search_rendered(text: str, registry: ChunkRegistry, named: Sequence[Chunk], encoder: TextEncoder) -> list[Piece]:
    """Split a rendered text as :func:`search_content` splits a content, but find no chunk over special tokens."""
    places = _places(text, registry, named, encoder.markers(text))
    pieces: list[tuple[int, Piece]] = [*places, *((begin, text[begin:end]) for begin, end in _gaps(places, len(text)))]
    return _joined(piece for _, piece in sorted(pieces, key=_position))


class Contents:
    """Holds the contents of messages, split into pieces, and a probe for each content.

    Attributes:
        texts: Text of each content.
        probes: Text to render in place of each content, with the content's outer whitespace, which templates may trim.
            A content without text is its own probe, because templates may treat empty contents in a special way.
    """

    def __init__(self, contents: Sequence[Sequence[Piece]]):
        """Hold ``contents`` in the order of their messages."""
        self._contents = contents
        self.texts = ["".join(map(text_of, pieces)) for pieces in contents]
        self._inner = [(len(text) - len(text.lstrip()), len(text.rstrip())) for text in self.texts]
        self.probes = [
            f"{text[:begin]}{_PROBE}{number}.{text[end:]}" if text.strip() else text
            for number, (text, (begin, end)) in enumerate(zip(self.texts, self._inner, strict=True))
        ]

    def spells(self, encoder: TextEncoder) -> bool:
        """Return whether known chunks in the contents spell special tokens."""
        known = (text_of(piece) for pieces in self._contents for piece in pieces if not isinstance(piece, str))
        return any(map(encoder.markers, known))

    def found_in(self, rendered: str, encoder: TextEncoder) -> list[Piece] | None:
        """Return the pieces of the ``rendered`` messages if the text alone shows for certain where the chunks stand.

        The result is None if the contents with chunks do not stand in the text in order, or could stand in several
        ways, or if a chunk would lie over a special token, which the template may have written.
        """
        known = [
            (list(_cut(pieces, inner)), text[slice(*inner)])
            for pieces, text, inner in zip(self._contents, self.texts, self._inner, strict=True)
            if any(not isinstance(piece, str) for piece in pieces)
        ]
        begins, end = [], 0
        for _, body in known:
            begins.append(rendered.find(body, end))
            if begins[-1] < 0:
                return None
            end = begins[-1] + len(body)
        markers, found, end = encoder.markers(rendered), list[Piece](), 0
        for (pieces, body), begin, behind in zip(known, begins, [*begins, len(rendered)][1:], strict=True):
            if rendered.find(body, begin + 1, behind) >= 0:
                return None
            found += [rendered[end:begin], *pieces]
            end = begin
            for piece in pieces:
                end += len(text_of(piece))
                if not isinstance(piece, str) and _over(markers, end - len(piece.text), end):
                    return None
        return _joined([*found, rendered[end:]])

    def placed(self, rendered: str, skeleton: str, registry: ChunkRegistry, encoder: TextEncoder) -> list[Piece]:
        """Return the pieces of the ``rendered`` messages, whose ``skeleton`` is rendered with the probes.

        ``registry`` has the chunks of escaped texts. From the first content that the template has rewritten in another
        way, the text is searched for the contents' chunks, as in :func:`search_rendered`.
        """
        first, *rest = skeleton.split(_PROBE)
        pieces: list[Piece] = []
        end = 0
        if rendered.startswith(first):
            pieces, end = [first], len(first)
            for part in rest:
                digits, dot, literal = part.partition(".")
                if not dot or not digits.isdecimal():  # the template has cut the probe
                    break
                number = int(digits)
                found = self._standing(rendered, end, number, literal, registry)
                if found is None:
                    break
                pieces += [*found, literal]
                end += sum(map(len, map(text_of, found))) + len(literal)
        chunks = ChunkRegistry(piece for content in self._contents for piece in content if isinstance(piece, Chunk))
        return _joined([*pieces, *search_rendered(rendered[end:], chunks, (), encoder)])

    def _standing(
        self, rendered: str, at: int, number: int, literal: str, registry: ChunkRegistry
    ) -> list[Piece] | None:
        """Return the inner pieces of content ``number`` if they stand at ``at`` with ``literal`` behind, else None."""
        inner = self._inner[number]
        for write in (str, in_json):
            body = write(self.texts[number][slice(*inner)])
            if rendered.startswith(body, at) and rendered.startswith(literal, at + len(body)):
                return [_written(piece, write, registry) for piece in _cut(self._contents[number], inner)]
        return None


def text_of(piece: Piece) -> str:
    """Return the text of a piece."""
    return piece if isinstance(piece, str) else piece.text


def in_json(text: str) -> str:
    """Return a text as a chat template escapes the text inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(piece: Piece, write: Callable[[str], str], registry: ChunkRegistry) -> Piece:
    """Apply ``write`` to a piece. A changed chunk becomes the registered chunk of the new text, or else PlainText."""
    text = write(text_of(piece))
    if text == text_of(piece):
        return piece
    if isinstance(piece, str):
        return text
    known = registry.get(chunk_id(text)) if isinstance(piece, Chunk) else None
    return known if known is not None and known.text == text else PlainText(text)


def _places(
    text: str, registry: ChunkRegistry, named: Sequence[Chunk], barred: Sequence[Range]
) -> list[tuple[int, Chunk]]:
    """Return the ascending places of the named and the registered chunks, none of which overlaps a ``barred`` range."""
    places = _named_places(text, named, barred)
    return sorted([*places, *registry.places(text, sorted([*_ranges(places), *barred]))], key=_position)


def _named_places(text: str, named: Sequence[Chunk], barred: Sequence[Range]) -> list[tuple[int, Chunk]]:
    """Return each named chunk's first place that overlaps neither an earlier named chunk nor a ``barred`` range."""
    found: list[tuple[int, Chunk]] = []
    taken = list(barred)
    seen: set[str] = set()
    for chunk in named:
        # Shorter texts stand in many texts by chance, so they are skipped as in the registry.
        if len(chunk.text) < MATCH_WINDOW or chunk.text in seen:
            continue
        seen.add(chunk.text)
        at = _first_free(text, chunk.text, taken)
        if at >= 0:
            found.append((at, chunk))
            insort(taken, (at, at + len(chunk.text)))
    return found


def _short_over(text: str, named: Iterable[Chunk], markers: Sequence[Range]) -> Iterator[Range]:
    """Yield the ranges where named chunks too short for a registry overlap any of ``markers`` (ascending, disjoint)."""
    for body in {chunk.text for chunk in named if len(chunk.text) < MATCH_WINDOW}:
        at = text.find(body)
        while at >= 0:
            if _over(markers, at, at + len(body)):
                yield at, at + len(body)
            at = text.find(body, at + 1)


def _first_free(text: str, body: str, taken: Sequence[Range]) -> int:
    """Return the first place of ``body`` outside of ``taken`` (ascending, disjoint); -1 if none."""
    at = text.find(body)
    while at >= 0 and (over := _over(taken, at, at + len(body))):
        at = text.find(body, over[1])  # every earlier position overlaps the range, too
    return at


def _over(ranges: Sequence[Range], begin: int, end: int) -> Range | None:
    """Return the first of ``ranges`` (ascending, disjoint) that overlaps the range ``begin`` to ``end``, or None."""
    behind = bisect_right(ranges, begin, key=_end)
    return ranges[behind] if behind < len(ranges) and ranges[behind][0] < end else None


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Join overlapping ranges; the result is ascending and disjoint."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _ranges(places: Iterable[tuple[int, Chunk]]) -> list[Range]:
    return sorted((at, at + len(chunk.text)) for at, chunk in places)


def _gaps(places: Iterable[tuple[int, Chunk]], length: int) -> list[Range]:
    """Return the ranges between chunks in ascending order."""
    edges = [0, *(edge for each in _ranges(places) for edge in each), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _cut(pieces: Sequence[Piece], part: Range) -> Iterator[Piece]:
    """Yield the pieces of a part of a content. Only text is cut, because chunks have no outer whitespace."""
    at = 0
    for piece in pieces:
        text = text_of(piece)
        kept = text[max(0, part[0] - at) : max(0, part[1] - at)]
        at += len(text)
        if len(kept) == len(text):
            yield piece
        elif kept:
            yield PlainText(kept) if isinstance(piece, PlainText) else kept


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with adjacent texts joined and empty pieces removed."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif text_of(piece):
            found.append(piece)
    return found
