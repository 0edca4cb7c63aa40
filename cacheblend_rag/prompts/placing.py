"""Places known chunks in a rendered prompt: in what users and documents say, never in what the template writes.

A chunk's text is searched for in each message's content, before it is rendered. Where the template puts the contents is seen by
rendering the messages once more with a stand-in for each: what stands between the stand-ins is the template's, and what stands in
their places is the content, unless the template has rewritten it. Where it writes a content inside a JSON string, as Llama 3's do
with what a tool returned, a chunk is the registered one of the escaped text, if there is one.
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

_begin: Callable[[Range], int] = itemgetter(0)
_end: Callable[[Range], int] = itemgetter(1)
_PROBE = f"{PROBE}-{token_hex(8)}-"  # another in each process: no document can know it

# What templates cut off a content's ends.
_TRIMS: tuple[Callable[[str], tuple[int, int]], ...] = (
    lambda text: (0, len(text)),
    lambda text: (len(text) - len(text.lstrip()), len(text.rstrip())),
    lambda text: (len(text) - len(text.lstrip("\n")), len(text.rstrip("\n"))),
    lambda text: (0, len(text.rstrip())),
    lambda text: (len(text) - len(text.lstrip()), len(text)),
    lambda text: (len(text) - len(text.lstrip("\n")), len(text)),
)


def search_content(text: str, registry: ChunkRegistry, named: Sequence[Chunk], encoder: TextEncoder) -> list[Piece]:
    """Split what somebody says into text and chunks: each named one once, in the order they are named, then all registered ones.

    A known chunk's text is data, whatever overlaps it: where another chunk takes a part of it, special tokens that are spelled
    in the rest of it come as :class:`~cacheblend_rag.prompts.chunk.PlainText`.
    """
    places = _named_places(text, named, [])
    places = sorted([*places, *registry.places(text, _ranges(places))], key=lambda place: place[0])
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
    return _joined(piece for _, piece in sorted(pieces, key=lambda each: each[0]))


def search_rendered(text: str, registry: ChunkRegistry, named: Sequence[Chunk], encoder: TextEncoder) -> list[Piece]:
    """Do the same in a text that a template may have written: no chunk is found where special tokens are spelled."""
    markers = encoder.markers(text)
    places = _named_places(text, named, markers)
    places += registry.places(text, sorted([*_ranges(places), *markers]))
    places.sort(key=lambda place: place[0])
    pieces: list[tuple[int, Piece]] = [*places, *((begin, text[begin:end]) for begin, end in _gaps(places, len(text)))]
    return _joined(piece for _, piece in sorted(pieces, key=lambda each: each[0]))


class Contents:
    """The contents of messages, each in pieces, and stand-ins for them.

    Attributes:
        texts: The contents.
        probes: What to render in their place; nothing for one without text, which templates may treat in their own way.
    """

    def __init__(self, contents: Sequence[Sequence[Piece]]):
        """Hold ``contents`` in the order in which their messages stand."""
        self._contents = contents
        self.texts = ["".join(map(text_of, pieces)) for pieces in contents]
        self.probes = [f"{_PROBE}{i}." if text.strip() else text for i, text in enumerate(self.texts)]

    def spells(self, encoder: TextEncoder) -> bool:
        """Say whether known chunks in them spell special tokens."""
        known = (text_of(piece) for pieces in self._contents for piece in pieces if not isinstance(piece, str))
        return any(map(encoder.markers, known))

    def placed(self, rendered: str, skeleton: str, registry: ChunkRegistry, encoder: TextEncoder) -> list[Piece]:
        """Return the pieces of ``rendered``.

        Args:
            rendered: The messages as the template renders them.
            skeleton: The same with the probes.
            registry: Chunks that may stand in place of those that the template has escaped.
            encoder: Knows special tokens. What the template has rewritten otherwise, and all behind it, is searched for the
                contents' chunks as in :func:`search_rendered`.
        """
        first, *rest = skeleton.split(_PROBE)
        pieces: list[Piece] = []
        end, seen = 0, set()
        if rendered.startswith(first):
            pieces, end = [first], len(first)
            for part in rest:
                digits, dot, literal = part.partition(".")
                if not dot or not digits.isdecimal():  # the template has cut it
                    break
                number = int(digits)
                found = self._standing(rendered, end, number, literal, registry)
                if found is None:
                    break
                seen.add(number)
                pieces += [*found, literal]
                end += sum(map(len, map(text_of, found))) + len(literal)
        left = [pieces for number, pieces in enumerate(self._contents) if number not in seen]
        pieces += _located(rendered[end:], [p for content in left for p in content if isinstance(p, Chunk)], encoder)
        return _joined(pieces)

    def _standing(
        self, rendered: str, at: int, number: int, literal: str, registry: ChunkRegistry
    ) -> list[Piece] | None:
        """Return the part of a content that stands at ``at``, with the template's ``literal`` behind it."""
        text = self.texts[number]
        for write in (str, in_json):
            for trim in _TRIMS:
                start, stop = trim(text)
                body = write(text[start:stop])
                if rendered.startswith(body, at) and rendered.startswith(literal, at + len(body)):
                    return [_written(piece, write, registry) for piece in _cut(self._contents[number], (start, stop))]
        return None


def text_of(piece: Piece) -> str:
    """Return the text of a piece."""
    return piece if isinstance(piece, str) else piece.text


def in_json(text: str) -> str:
    """Return a text as it stands inside a JSON string that a chat template writes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(piece: Piece, write: Callable[[str], str], registry: ChunkRegistry) -> Piece:
    """Return a piece as it is written; a chunk that this changes is data, and a chunk only where that one is registered."""
    text = write(text_of(piece))
    if text == text_of(piece):
        return piece
    if isinstance(piece, str):
        return text
    known = registry.get(chunk_id(text)) if isinstance(piece, Chunk) else None
    return known if known is not None and known.text == text else PlainText(text)


def _named_places(text: str, named: Sequence[Chunk], barred: Sequence[Range]) -> list[tuple[int, Chunk]]:
    """Return where each named chunk stands first without overlapping one named before it or what is barred."""
    found: list[tuple[int, Chunk]] = []
    taken = list(barred)
    seen: set[str] = set()
    for chunk in named:
        # As in the registry: what is shorter stands in many texts by chance.
        if len(chunk.text) < MATCH_WINDOW or chunk.text in seen:
            continue
        seen.add(chunk.text)
        at = _first_free(text, chunk.text, taken)
        if at >= 0:
            found.append((at, chunk))
            insort(taken, (at, at + len(chunk.text)))
    return found


def _short_over(text: str, named: Iterable[Chunk], markers: Sequence[Range]) -> Iterator[Range]:
    """Yield where named chunks that are too short for a registry stand over any of the markers (ascending, apart)."""
    for body in {chunk.text for chunk in named if len(chunk.text) < MATCH_WINDOW}:
        at = text.find(body)
        while at >= 0:
            behind = bisect_right(markers, at, key=_end)
            if behind < len(markers) and markers[behind][0] < at + len(body):
                yield at, at + len(body)
            at = text.find(body, at + 1)


def _first_free(text: str, body: str, taken: Sequence[Range], start: int = 0) -> int:
    """Return where ``body`` stands first, from ``start`` on, outside the ranges taken (ascending, apart), -1 for nowhere."""
    at = text.find(body, start)
    while at >= 0:
        behind = bisect_right(taken, at, key=_end)
        if behind == len(taken) or taken[behind][0] >= at + len(body):
            return at
        at = text.find(body, taken[behind][1])  # what begins before that overlaps it, too
    return at


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Return what any of the ranges covers: ascending, apart."""
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
    """Return what lies between chunks in ascending order."""
    edges = [0, *(edge for each in _ranges(places) for edge in each), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _cut(pieces: Sequence[Piece], part: Range) -> Iterator[Piece]:
    """Yield the pieces of a part of a content; only text is ever cut off, as chunks have no outer whitespace."""
    at = 0
    for piece in pieces:
        text = text_of(piece)
        kept = text[max(0, part[0] - at) : max(0, part[1] - at)]
        at += len(text)
        if len(kept) == len(text):
            yield piece
        elif kept:
            yield PlainText(kept) if isinstance(piece, PlainText) else kept


def _located(text: str, chunks: Iterable[Chunk], encoder: TextEncoder) -> Iterator[Piece]:
    """Find chunks in a text that a template has made of them, in order; what it has rewritten stays text."""
    chunks = list(chunks)
    markers = encoder.markers(text) if chunks else []
    end = 0
    for chunk in chunks:
        at = _first_free(text, chunk.text, markers, end)
        if at >= 0:
            yield from (text[end:at], chunk)
            end = at + len(chunk.text)
    yield text[end:]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with text that stands together as one, and nothing empty."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif text_of(piece):
            found.append(piece)
    return found
