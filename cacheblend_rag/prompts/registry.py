"""The chunks that an engine knows while it runs, found by id and by content; nothing of it is kept on disk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cacheblend_rag.prompts.chunk import Chunk

MATCH_WINDOW = 16
"""Characters every chunk is indexed by. Shorter chunks are never found by content: a phrase like "Yes, it is." stands in
many prompts by chance, and reusing three tokens of KV gains nothing."""


_MULTIPLIERS = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, MATCH_WINDOW + 1)], np.uint64)
_MIN_FILTER_BITS = 16
_SLOTS_PER_OPENING = 16


class ChunkRegistry:
    """The known chunks, in memory; the index and a server's registered chunks are on disk.

    Thread-safe; :meth:`find` takes no lock.
    Each chunk is indexed by a hash of its first :data:`MATCH_WINDOW` characters. A prompt's windows are hashed at once and
    looked up in a bit filter; where it says yes, the lengths of the chunks with that opening are known, and whole chunks are
    compared by one dictionary look-up a length. So neither the number of chunks nor a common opening costs much.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()):
        """Start with ``chunks``."""
        self._by_id: dict[str, Chunk] = {}
        self._by_text: dict[str, Chunk] = {}
        self._lengths: dict[int, tuple[int, ...]] = {}  # descending; replaced, never changed, so readers need no lock
        self._uses: Counter[tuple[int, int]] = Counter()  # chunks by (opening, length)
        self._filter: npt.NDArray[np.bool_] = np.zeros(1 << _MIN_FILTER_BITS, np.bool_)
        self._lock = threading.Lock()
        self.add(chunks)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks; one with a known id replaces the former."""
        chunks = list(chunks)
        openings = _opening_hashes([chunk.text for chunk in chunks])
        with self._lock:
            for chunk, opening in zip(chunks, openings, strict=True):
                self._forget(chunk.id)
                self._by_id[chunk.id] = chunk
                if len(chunk.text) >= MATCH_WINDOW and chunk.text not in self._by_text:
                    self._by_text[chunk.text] = chunk
                    self._add_length(opening, len(chunk.text))

    def remove(self, chunk_ids: Iterable[str]) -> None:
        """Forget chunks; unknown ids are ignored."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._forget(chunk_id)

    def get(self, chunk_id: str) -> Chunk | None:
        """Return the chunk with that id."""
        return self._by_id.get(chunk_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._by_id

    def __iter__(self) -> Iterator[Chunk]:
        with self._lock:
            return iter(list(self._by_id.values()))

    def find(self, text: str) -> list[str | Chunk]:
        """Split plain text into text and registered chunks.

        At each position from the left the longest registered chunk that stands there is taken, and the search goes on
        behind it. Joining the texts of the result gives back ``text``; no piece is empty.
        """
        found: list[str | Chunk] = []
        end = 0
        openings = _window_hashes(text)
        slots = self._filter  # held once: a writer may replace it by a larger one
        hits = np.flatnonzero(slots[_slot(openings, len(slots))])
        for at, opening in zip(hits.tolist(), openings[hits].tolist(), strict=True):
            if at < end:
                continue
            chunk = self._longest(text, at, self._lengths.get(opening, ()))
            if chunk is None:
                continue
            if at > end:
                found.append(text[end:at])
            found.append(chunk)
            end = at + len(chunk.text)
        if end < len(text):
            found.append(text[end:])
        return found

    def _longest(self, text: str, at: int, lengths: tuple[int, ...]) -> Chunk | None:
        room = len(text) - at
        for length in lengths:
            if length <= room and (chunk := self._by_text.get(text[at : at + length])) is not None:
                return chunk
        return None

    def _forget(self, chunk_id: str) -> None:
        chunk = self._by_id.pop(chunk_id, None)
        if chunk is not None and self._by_text.get(chunk.text) is chunk:
            del self._by_text[chunk.text]
            self._remove_length(_opening_hashes([chunk.text])[0], len(chunk.text))

    def _add_length(self, opening: int, length: int) -> None:
        """Count one more chunk of that length with that opening; :meth:`find` looks for the lengths counted."""
        self._uses[opening, length] += 1
        if self._uses[opening, length] > 1:
            return  # find knows the length already
        self._lengths[opening] = tuple(sorted((*self._lengths.get(opening, ()), length), reverse=True))
        self._filter[_slot(np.uint64(opening), len(self._filter))] = True
        if len(self._lengths) * _SLOTS_PER_OPENING > len(self._filter):
            self._grow()

    def _remove_length(self, opening: int, length: int) -> None:
        """Count one chunk of that length with that opening less."""
        self._uses[opening, length] -= 1
        if self._uses[opening, length] > 0:
            return  # other chunks have the same opening and length
        del self._uses[opening, length]
        remaining = tuple(known for known in self._lengths[opening] if known != length)
        if remaining:
            self._lengths[opening] = remaining
        else:
            del self._lengths[opening]  # its bit stays: a false alarm at worst

    def _grow(self) -> None:
        slots = np.zeros(4 * len(self._filter), np.bool_)
        slots[_slot(np.fromiter(self._lengths, np.uint64, len(self._lengths)), len(slots))] = True
        self._filter = slots


def _codes(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)


def _opening_hashes(texts: Sequence[str]) -> list[int]:
    openings = "".join(text[:MATCH_WINDOW].ljust(MATCH_WINDOW) for text in texts)
    hashes: list[int] = (
        (_codes(openings).reshape(-1, MATCH_WINDOW) * _MULTIPLIERS).sum(axis=1, dtype=np.uint64).tolist()
    )
    return hashes


def _window_hashes(text: str) -> npt.NDArray[np.uint64]:
    """Hash every window of :data:`MATCH_WINDOW` characters; returns ``[max(0, len(text) - MATCH_WINDOW + 1)]``."""
    codes = _codes(text)
    count = max(0, len(codes) - MATCH_WINDOW + 1)
    hashes = np.zeros(count, np.uint64)
    for offset, multiplier in enumerate(_MULTIPLIERS):
        hashes += codes[offset : offset + count] * multiplier
    return hashes


def _slot(hashes: npt.NDArray[np.uint64] | np.uint64, slots: int) -> npt.NDArray[np.uint64] | np.uint64:
    # The high bits of a multiplicative hash are the mixed ones.
    return hashes >> np.uint64(64 - (slots.bit_length() - 1))
