"""Finds the sentence nearest to a question, and the source sentences that support the sentences of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing Embedder imports numpy, which `cacheblend ask` does not need
    from cacheblend_rag.retrieval.embedding import Embedder

# Matches the end of a sentence, of a paragraph, or of an item of a list or table. A full stop within a number, a name
# or a path does not match, and neither does a line end within a paragraph.
_END = re.compile(r"(?<=[.!?])(?<!\n\d\.)(?<!\n\d\d\.)\s+|\n\s*\n\s*|\n\s*(?=[-*+#|>]|\d+[.)])")
_WORD = re.compile(r"\w{3,}|\d+")
_TELLING = 4
"""Minimum length, in characters, of a word that is compared: most shorter words, such as "the", occur in every text."""

_OF_WORDS = 0.5
"""Score added for a sentence that contains all words of the question, on the scale of the cosine similarity."""
_LONG = 8
"""A line with fewer words that ends in a letter or a digit counts as a heading."""


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end offset of each sentence, heading or list item of a text, without surrounding white space.

    Example:
        >>> text = "Rye bread. Its price is 2.50."
        >>> [text[a:b] for a, b in sentences(text)]
        ['Rye bread.', 'Its price is 2.50.']
    """
    for start, end in pairwise((0, *(found.end() for found in _END.finditer(text)), len(text))):
        if piece := text[start:end].strip():
            begin = text.index(piece, start)
            yield begin, begin + len(piece)


def words(text: str) -> set[str]:
    """Return a text's words of three letters or more and its numbers, in lower case."""
    return set(_WORD.findall(text.lower()))


def nearest_sentence(text: str, question: str, embedder: Embedder) -> tuple[int, int] | None:
    """Return the start and end offset of the sentence nearest to a question, or None if the text has no sentence.

    A sentence scores by its similarity in meaning and by the words of the question that it contains, such as a name.
    Headings score high but answer nothing, so headings are skipped if the text has other sentences.
    """
    every = list(sentences(text))
    found = [span for span in every if not _is_heading(text[slice(*span)])] or every
    if len(found) < 2:
        return found[0] if found else None
    vector, asked = embedder.question(question), _telling(question)
    scores = []
    for (start, end), windows in zip(found, embedder.texts([text[slice(*span)] for span in found]), strict=True):
        named = len(asked & _telling(text[start:end])) / max(1, len(asked))
        scores.append(float((windows @ vector).max()) + _OF_WORDS * named)
    return found[scores.index(max(scores))]


def _is_heading(line: str) -> bool:
    return line.startswith("#") or (len(line.split()) < _LONG and line[-1].isalnum())


@dataclass(frozen=True)
class Saying:
    """Locates a source sentence that supports an answer: number of the text (from 0), start and end offset."""

    text: int
    start: int
    end: int


def said_by(sentence: str, question: str, texts: Sequence[str]) -> Saying | None:
    """Return the source sentence that supports a sentence of an answer, or None if no source sentence does.

    Words are compared, not meanings: a source sentence supports the answer's sentence if it contains more than half of
    the significant words that the answer's sentence has and the question has not. The source sentence that shares most
    of these words wins, on a tie the source sentence with most words of the question, and then the first of ``texts``.
    Words of the question do not count, because texts that do not answer the question repeat them, too.
    """
    asked = _telling(question)
    told = _telling(sentence) - asked
    best, most = None, (len(told) // 2, -1)
    for number, text in enumerate(texts):
        for start, end in sentences(text):
            words_there = _telling(text[start:end])
            shared = len(told & words_there)
            if shared * 2 > len(told) and (shared, len(asked & words_there)) > most:
                best, most = Saying(number, start, end), (shared, len(asked & words_there))
    return best


def with_marks(answer: str, question: str, texts: Sequence[str]) -> tuple[str, tuple[Saying, ...]]:
    """Return an answer with a source number such as ``[1]`` after each supported sentence, and the source sentences.

    Example:
        >>> with_marks("She is from Seldale. I guess.", "Who is Ada?", ["Ada's home was Seldale."])
        ('She is from Seldale. [1] I guess.', (Saying(text=0, start=0, end=23),))
    """
    if "```" in answer:  # a mark would change the code
        return answer, ()
    parts, found, at = [], [], 0
    for start, end in sentences(answer):
        parts.append(answer[at:end])
        at = end
        if (said := said_by(answer[start:end], question, texts)) is not None:
            parts.append(f" [{said.text + 1}]")
            found.append(said)
    return "".join(parts) + answer[at:], tuple(found)


def _telling(text: str) -> set[str]:
    return {word for word in words(text) if len(word) >= _TELLING or word.isdigit()}
