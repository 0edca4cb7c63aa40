"""Finds which of a million texts may occur where in a prompt, by hashes alone: 20 bytes per text of any length.

A text's hash is a polynomial of its code points modulo 2^64, so that the hash of any part of a prompt is one
subtraction and one multiplication of prefix sums. The table indexes a text by the hash of its *opening*: its first 16,
128 or 1024 characters, whichever is the longest that the text has. The search compares openings at all positions of the
prompt at once. At the positions with an equal opening, the search compares whole texts by length and hash. The result
is a list of candidates; the caller compares the texts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

OPENINGS = (16, 128, 1024)
"""Lengths of openings in characters. Long openings serve texts that begin alike: a page's header, a line of dashes."""

SIGNATURE = np.dtype([("length", "<u4"), ("opening", "<u8"), ("digest", "<u8")])
"""Signature of a text: length in characters, hash of the opening, hash of the whole text."""

CANDIDATE = np.dtype([("at", "<i8"), ("length", "<i8"), ("number", "<i8"), ("source", "<i8")])
"""A text that may occur in a prompt: position, length, number as given to the table, and number of the table."""

Signatures = npt.NDArray[np.void]
Candidates = npt.NDArray[np.void]
Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Range = tuple[int, int]
"""Range of characters in a text: begin (inclusive) and end (exclusive)."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIN_SLOTS = 1 << 16
_SLOTS_PER_TEXT = 16
_MAX_PAIRS = 1 << 20
"""Most comparisons of a text with a position, for one prompt. Without a limit, texts that begin alike take minutes for
a prompt that repeats the beginning. Positions with fewer texts to compare are compared first."""
_SMALL = 4096


def signatures_of(texts: Sequence[str]) -> Signatures:
    """Return the signatures ``[len(texts)]``; signatures of texts shorter than the shortest opening are not usable."""
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(texts) else ends
    hashes = PromptHashes("".join(texts))
    made = np.zeros(len(texts), SIGNATURE)
    made["length"] = ends - begins
    made["opening"] = hashes.of(begins, np.minimum(ends, begins + opening_length(made["length"])))
    made["digest"] = hashes.of(begins, ends)
    return made


def opening_length(lengths: npt.NDArray[np.uint32]) -> Indices:
    """Return the lengths of the openings, in characters, for texts with ``lengths`` characters."""
    shelf = np.maximum(np.searchsorted(OPENINGS, lengths, "right") - 1, 0)
    found: Indices = np.asarray(OPENINGS, np.int64)[shelf]
    return found


class PromptHashes:
    """Computes the hash of any part of a text from prefix sums."""

    def __init__(self, text: str):
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        self.length = len(codes)
        self._sums = np.zeros(self.length + 1, np.uint64)
        np.multiply(codes, _powers(_BASE, self.length), out=self._sums[1:])
        np.cumsum(self._sums[1:], out=self._sums[1:])
        self._inverses = _powers(_INVERSE, self.length + 1)

    def of(self, begins: Indices, ends: Indices) -> Hashes:
        """Return the hashes of the parts from ``begins`` to ``ends``."""
        hashes: Hashes = (self._sums[ends] - self._sums[begins]) * self._inverses[begins]
        return hashes

    def windows(self, length: int) -> Hashes:
        """Return the hashes of all parts with ``length`` characters: ``[max(0, self.length - length + 1)]``."""
        count = max(0, self.length - length + 1)
        hashes: Hashes = self._sums[length:] - self._sums[:count]
        hashes *= self._inverses[:count]
        return hashes


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Join ``parts``, sorted by ascending position, then by descending length, then by ascending numbers."""
    found: Candidates = np.concatenate([np.zeros(0, CANDIDATE), *parts])
    ordered: Candidates = found[np.lexsort((found["source"], found["number"], -found["length"], found["at"]))]
    return ordered


def touching(candidates: Candidates, ranges: Sequence[Range]) -> npt.NDArray[np.bool_]:
    """Return for each candidate whether it overlaps one of ``ranges`` (ascending, disjoint)."""
    begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    behind = np.searchsorted(
        ends, candidates["at"], "right"
    )  # the first range that ends behind a candidate's beginning
    begins = np.append(begins, np.iinfo(np.int64).max)
    touch: npt.NDArray[np.bool_] = begins[behind] < candidates["at"] + candidates["length"]
    return touch


class TextTable:
    """Holds signatures of texts, each with a number. The table is immutable: :meth:`with_more` returns a new table."""

    def __init__(self, shelves: Sequence[Sequence[_Shelf]] = ()):
        """Use existing shelves; by default the table is empty."""
        self._shelves = tuple(map(tuple, shelves)) or tuple(() for _ in OPENINGS)
        self.size = sum(shelf.size for row in self._shelves for shelf in row)

    def with_more(self, signatures: Signatures, numbers: Indices) -> TextTable:
        """Return a table that also has the given texts, except texts shorter than the shortest opening."""
        openings = opening_length(signatures["length"])
        openings[signatures["length"] < OPENINGS[0]] = 0
        rows = []
        for length, row in zip(OPENINGS, self._shelves, strict=True):
            new = openings == length
            chosen = signatures[new]
            shelf = _Shelf.of(chosen["opening"], chosen["length"], chosen["digest"], numbers[new])
            rows.append(_shelved(row, shelf) if shelf.size else row)
        return TextTable(rows)

    def candidates(self, hashes: PromptHashes) -> Candidates:
        """Return the texts that may occur in a prompt, in the order of :func:`joined`."""
        found = []
        budget = _MAX_PAIRS
        # The longest openings come first, because few are alike. No shelf may use up the budget of the other shelves.
        for length, row in reversed(list(zip(OPENINGS, self._shelves, strict=True))):
            windows = hashes.windows(length) if row else hashes.windows(hashes.length + 1)
            for shelf in row if len(windows) else ():
                candidates, compared = shelf.candidates(hashes, windows, budget // 2)
                found.append(candidates)
                budget -= compared
        return joined(found)


def _shelved(row: Sequence[_Shelf], new: _Shelf) -> list[_Shelf]:
    """Add a shelf, and join shelves until each is at least twice as large as the next, so that few sorts are needed."""
    shelves = [*row, new]
    while len(shelves) > 1 and shelves[-2].size < max(2 * shelves[-1].size, _SMALL):
        last = shelves.pop()
        shelves[-1] = shelves[-1].joined(last)
    return shelves


@dataclass(frozen=True)
class _Shelf:
    """Holds texts with openings of one length, sorted by the hash of the opening.

    ``filter`` tells whether the hash of any opening falls into a slot. The other arrays have one item a text.
    """

    openings: Hashes
    lengths: Indices
    digests: Hashes
    numbers: Indices
    filter: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, openings: Hashes, lengths: Indices, digests: Hashes, numbers: Indices) -> Self:
        order = np.argsort(openings, kind="stable")
        slots = max(_MIN_SLOTS, 1 << (_SLOTS_PER_TEXT * len(order) - 1).bit_length())
        filled = np.zeros(slots, np.bool_)
        filled[_slot(openings, slots)] = True
        return cls(openings[order], lengths[order], digests[order], numbers[order], filled)

    @property
    def size(self) -> int:
        return len(self.numbers)

    def joined(self, other: _Shelf) -> _Shelf:
        names = ("openings", "lengths", "digests", "numbers")
        return _Shelf.of(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))

    def candidates(self, prompt: PromptHashes, windows: Hashes, budget: int) -> tuple[Candidates, int]:
        """Return the texts that may occur in a prompt, and the number of comparisons: ``budget`` at most."""
        # Each step leaves few positions to the next step, which costs more per position.
        (at,) = self.filter.take(_slot(windows, len(self.filter))).nonzero()
        first = self.openings.searchsorted(windows[at], "left")
        stands = self.openings.take(first, mode="clip") == windows[at]
        at, first = at[stands], first[stands]
        count = self.openings.searchsorted(windows[at], "right") - first
        if int(count.sum()) > budget:
            order = np.argsort(count, kind="stable")
            kept = np.sort(order[np.cumsum(count[order]) <= budget])
            at, first, count = (values[kept] for values in (at, first, count))
        return self._compared(prompt, at, first, count), int(count.sum())

    def _compared(self, prompt: PromptHashes, at: Indices, first: Indices, count: Indices) -> Candidates:
        """Compare by length and hash: the prompt at each position ``at`` with ``count`` texts from ``first`` on."""
        begins = at.repeat(count)
        offsets = np.arange(len(begins)) - (count.cumsum() - count).repeat(count)
        texts = first.repeat(count) + offsets
        lengths = self.lengths[texts].astype(np.int64)
        fits = begins + lengths <= prompt.length
        begins, texts, lengths = begins[fits], texts[fits], lengths[fits]
        same = prompt.of(begins, begins + lengths) == self.digests[texts]
        found = np.zeros(int(same.sum()), CANDIDATE)
        found["at"], found["length"], found["number"] = begins[same], lengths[same], self.numbers[texts[same]]
        return found


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers, out=powers)


def _slot(hashes: Hashes, slots: int) -> Indices:
    # The high bits of a multiplicative hash are the well-mixed bits. NumPy accepts signed indices without a copy.
    return (hashes >> np.uint64(64 - (slots.bit_length() - 1))).view(np.int64)
