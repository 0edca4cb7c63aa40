"""Registers an engine's chunks in memory, and finds chunks by id and by content."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.matching import (
    OPENINGS,
    Candidates,
    Indices,
    PromptHashes,
    Range,
    Signatures,
    TextTable,
    joined,
    signatures_of,
    touching,
)

MATCH_WINDOW = OPENINGS[0]
"""Least number of characters of a chunk that is found by content. A phrase like "Yes, it is." occurs in many prompts by
chance, and reusing three tokens of KV gains nothing."""

_MAX_SOURCES = 16
_MAX_WRONG = 1024
"""Most candidates read for a prompt with an equal hash and another text: removed chunks, forged hashes."""
_PAGE = 256
_SMALL = 4096

_log = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """Provides chunks from outside the registry, such as from a file; the registry holds only their signatures."""

    @property
    def generation(self) -> Hashable:
        """Return a value that changes with every change of the chunks."""

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        """Return rows (ascending) and signatures of the chunks with rows above ``after``; no row is ever used twice."""

    def chunk_at(self, row: int) -> Chunk | None:
        """Return the chunk of a row, or None if the chunk was removed."""

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        """Return the ids among ``chunk_ids`` whose chunks the source has."""

    def named(self, chunk_id: str) -> Chunk | None:
        """Return the chunk with that id, or None."""

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        """Return up to ``most`` chunks with ids after ``chunk_id``, in the order of their ids."""

    def count(self) -> int:
        """Return the number of chunks."""


@dataclass(frozen=True)
class _Attached:
    """Holds a source, and the signatures of its chunks up to the row ``last``, as of ``generation``.

    A table larger than ``check_at`` may have many chunks that were removed from the source.
    """

    source: ChunkSource
    lent: bool = False
    table: TextTable = field(default_factory=TextTable)
    generation: Hashable = None
    last: int = 0
    check_at: int = 0

    def followed(self) -> _Attached:
        """Return a copy that also has the source's new chunks; rebuild the table once half of its chunks were removed."""
        generation = self.source.generation
        if generation == self.generation:
            return self
        now = self._filed(generation)
        if now.table.size <= max(self.check_at, _SMALL):
            return now
        if now.table.size > 2 * self.source.count() + _SMALL:
            now = _Attached(self.source, self.lent)._filed(generation)
        return replace(now, check_at=2 * now.table.size)

    def _filed(self, generation: Hashable) -> _Attached:
        rows, signatures = self.source.signatures_after(self.last)
        table, last = (self.table.with_more(signatures, rows), int(rows[-1])) if len(rows) else (self.table, self.last)
        return replace(self, table=table, last=last, generation=generation)


class ChunkRegistry:
    """Registers chunks: added chunks in memory, and the chunks of attached sources with 20 bytes of memory each.

    A *lent* source belongs to another registry: its chunks are found by id and in text, and are neither listed nor
    counted. Thread-safe; :meth:`find` takes no lock. Methods raise StoreError if a source cannot be read.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()):
        self._added = AddedChunks()
        self._attached: tuple[_Attached, ...] = (_Attached(self._added),)
        self._lock = threading.Lock()
        self.add(chunks)

    def attach(self, source: ChunkSource, lent: bool = False) -> None:
        """Register the chunks of ``source``, which may be ``lent``; :meth:`follow` registers later changes.

        If two sources have a chunk with the same id, the registry uses the source attached first.

        Raises:
            InputError: Too many sources are attached.
        """
        with self._lock:
            if any(each.source is source for each in self._attached):
                return
            if len(self._attached) == _MAX_SOURCES:
                raise InputError(
                    f"An engine knows the chunks of {_MAX_SOURCES - 1} indexes at the most, and has as many open: close those "
                    "that are no longer asked (RagPipeline.close), or use another engine."
                )
            self._follow((*self._attached, _Attached(source, lent)))

    def detach(self, source: ChunkSource) -> None:
        """Remove a source and its chunks from the registry; a source that is not attached is ignored."""
        with self._lock:
            self._attached = tuple(each for each in self._attached if each.source is not source)

    def follow(self, only: ChunkSource | None = None) -> None:
        """Register the chunks that were added to all sources, or to the source ``only``.

        Chunks that were added to the registry, and that a source has now, belong to the source from then on. A chunk
        that was removed from a source is not found any more, even without a call of the method.
        """
        with self._lock:
            self._follow(self._attached, only)

    def _follow(self, attached: tuple[_Attached, ...], only: ChunkSource | None = None) -> None:
        followed = tuple(each.followed() if only in (None, each.source) else each for each in attached)
        for before, now in zip(attached, followed, strict=True):
            if now is not before and now.source is not self._added:
                self._added.remove(now.source.known(self._added.ids()))
        self._attached = followed

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks. A chunk replaces an added chunk with the same id, and is ignored if a source has the id."""
        given = {chunk.id: chunk for chunk in chunks}
        if not given:
            return
        with self._lock:
            for each in self._attached[1:]:
                for known in each.source.known(list(given)):
                    del given[known]
            self._added.put(given.values())
            self._attached = (self._attached[0].followed(), *self._attached[1:])

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Remove added chunks from the registry; chunks of sources stay, and unknown ids are ignored."""
        with self._lock:
            self._added.remove(chunk_ids)

    def get(self, chunk_id: str) -> Chunk | None:
        """Return the chunk with that id, or None."""
        return _named((each.source for each in self._attached), chunk_id)

    def unknown(self, chunk_ids: set[str]) -> set[str]:
        """Return the ids whose chunks are not registered; return all ids if a source cannot be read."""
        asked = list(chunk_ids)
        try:
            return chunk_ids.difference(*(each.source.known(asked) for each in self._attached)) if asked else set()
        except StoreError as error:
            _log.warning("Whether chunks are still known cannot be told: %s", error)
            return chunk_ids

    def is_lent(self, chunk_id: str) -> bool:
        """Return whether the chunk that :meth:`get` returns belongs to a lent source."""
        return next((each.lent for each in self._attached if each.source.known([chunk_id])), False)

    def _own(self) -> tuple[ChunkSource, ...]:
        """Return the sources that are not lent."""
        return tuple(each.source for each in self._attached if not each.lent)

    def others_have(self, chunk: Chunk) -> bool:
        """Return whether a chunk with another id, not from a lent source, has the text, and so the KV, of ``chunk``."""
        usual = chunk_id(chunk.text)
        if usual != chunk.id and (found := _named(self._own(), usual)) is not None and found.text == chunk.text:
            return True
        attached, candidates = self._candidates(chunk.text)
        whole = candidates[(candidates["at"] == 0) & (candidates["length"] == len(chunk.text))]
        own = ((attached[number].source, row) for _, _, row, number in whole.tolist() if not attached[number].lent)
        known = (_chunk_at(source, row) for source, row in own)
        return any(other is not None and other.text == chunk.text and other.id != chunk.id for other in known)

    def __len__(self) -> int:
        """Count the chunks; a chunk in two sources counts twice."""
        return sum(source.count() for source in self._own())

    def __contains__(self, chunk_id: object) -> bool:
        return isinstance(chunk_id, str) and any(each.source.known([chunk_id]) for each in self._attached)

    def __iter__(self) -> Iterator[Chunk]:
        return self.since("")

    def since(self, last: str) -> Iterator[Chunk]:
        """Iterate over the chunks with ids after ``last``, in the order of their ids; read a few at a time."""
        while page := self.named_after(last, _PAGE):
            yield from page
            last = page[-1].id

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        """Return up to ``most`` chunks with ids after ``chunk_id``, in the order of their ids."""
        found: dict[str, Chunk] = {}
        for source in reversed(self._own()):
            found |= {chunk.id: chunk for chunk in source.named_after(chunk_id, most)}
        return [found[name] for name in sorted(found)[:most]]

    def find(self, text: str) -> list[str | Chunk]:
        """Split plain text into text and the known chunks of :meth:`places`.

        Joining the texts of the result gives back ``text``; no piece is empty.
        """
        found: list[str | Chunk] = []
        end = 0
        for at, chunk in self.places(text):
            found += [text[end:at], chunk] if at > end else [chunk]
            end = at + len(chunk.text)
        if end < len(text):
            found.append(text[end:])
        return found

    def places(self, text: str, barred: Sequence[Range] = ()) -> list[tuple[int, Chunk]]:
        """Return the position and chunk of each known chunk found in ``text``, ascending.

        From the left, the search takes the longest chunk at a position and continues behind the chunk. No chunk
        overlaps a range of characters in ``barred`` (ascending, disjoint).
        """
        found: list[tuple[int, Chunk]] = []
        end = 0
        attached, candidates = self._candidates(text)
        reads = _MAX_WRONG
        for at, _, row, number in candidates[~touching(candidates, barred)].tolist():
            if at < end:
                continue
            chunk = _chunk_at(attached[number].source, row)
            if chunk is None or not text.startswith(chunk.text, at):
                reads -= 1
                if not reads:
                    break
                continue
            found.append((at, chunk))
            end = at + len(chunk.text)
        return found

    def covering(self, text: str, ranges: Sequence[Range]) -> list[Range]:
        """Return the ranges (maybe overlapping) of known chunks that overlap ``ranges`` (ascending, disjoint)."""
        attached, candidates = self._candidates(text)
        found: list[Range] = []
        reads = _MAX_WRONG
        for at, length, row, number in candidates[touching(candidates, ranges)].tolist():
            if found and at + length <= found[-1][1]:
                continue  # the candidate covers no further characters
            reads -= 1
            chunk = _chunk_at(attached[number].source, row) if reads > 0 else None
            # After _MAX_WRONG reads the equal hash suffices, without a comparison of the text.
            if reads <= 0 or (chunk is not None and text.startswith(chunk.text, at)):
                found.append((at, at + length))
        return found

    def _candidates(self, text: str) -> tuple[tuple[_Attached, ...], Candidates]:
        """Return the attached sources, and the candidates of all of their tables in ``text``."""
        attached, hashes, parts = self._attached, PromptHashes(text), []
        for number, each in enumerate(attached):
            found = each.table.candidates(hashes)
            found["source"] = number
            parts.append(found)
        return attached, joined(parts)


def _named(sources: Iterable[ChunkSource], chunk_id: str) -> Chunk | None:
    return next((found for source in sources if (found := source.named(chunk_id)) is not None), None)


def _chunk_at(source: ChunkSource, row: int) -> Chunk | None:
    try:
        return source.chunk_at(row)
    except StoreError as error:
        _log.warning("A chunk in the prompt is taken for text: %s", error)
        return None


class AddedChunks(ChunkSource):
    """Holds the chunks that were added to a registry, in memory."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}
        self._chunks: dict[int, Chunk] = {}
        self._last = 0

    @property
    def generation(self) -> int:
        return self._last

    def put(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks; a chunk replaces an existing chunk with the same id."""
        for chunk in chunks:
            row = self._row_of.get(chunk.id)
            if row is not None and self._chunks[row].text != chunk.text:
                del self._chunks[row]
                row = None
            if row is None:
                row = self._last + 1
            self._chunks[row] = chunk
            self._last = max(self._last, row)
            self._row_of[chunk.id] = row

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Remove chunks; unknown ids are ignored."""
        for name in chunk_ids:
            row = self._row_of.pop(name, None)
            if row is not None:
                del self._chunks[row]

    def ids(self) -> list[str]:
        """Return all ids."""
        return list(self._row_of)

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        new = [row for row in range(after + 1, self._last + 1) if row in self._chunks]
        return np.array(new, np.int64), signatures_of([self._chunks[row].text for row in new])

    def chunk_at(self, row: int) -> Chunk | None:
        return self._chunks.get(row)

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        return {chunk_id for chunk_id in chunk_ids if chunk_id in self._row_of}

    def named(self, chunk_id: str) -> Chunk | None:
        row = self._row_of.get(chunk_id)
        return None if row is None else self._chunks.get(row)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        names = sorted(name for name in list(self._row_of) if name > chunk_id)[:most]
        return [chunk for name in names if (chunk := self.named(name)) is not None]

    def count(self) -> int:
        return len(self._row_of)
