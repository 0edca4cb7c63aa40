"""Finds the sentence of a text that is nearest to a question, and the text that says what a sentence of an answer says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy comes with it, and `cacheblend ask` compares words alone
    from cacheblend_rag.retrieval.embedding import Embedder

# Where a sentence, a paragraph, or an item of a list or table ends: a full stop within a number, a name or a path ends none, and
# neither does the end of a line within a paragraph.
_END = re.compile(r"(?<=[.!?])(?<!\n\d\.)(?<!\n\d\d\.)\s+|\n\s*\n\s*|\n\s*(?=[-*+#|>]|\d+[.)])")
_WORD = re.compile(r"\w{3,}|\d+")
_TELLING = 4
"""Shortest word, in characters, that tells what a sentence says: most of the shorter ones, as "the", are in every text."""

_OF_WORDS = 0.5
"""Weight of a sentence that has all of a question's words, beside a cosine of 1."""
_LONG = 8
"""A line of fewer words that ends without a stop is taken for a heading."""


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence, heading or item of a text begins and ends, without white space around it.

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
    """Return where the sentence nearest to a question begins and ends; None in a text without any.

    Near is what is alike in meaning and has words of the question, such as the name that it asks about. A heading has both and
    answers nothing, so that none is chosen where there are sentences.

    Args:
        text: A chunk's text; each of its sentences is embedded.
        question: The question.
        embedder: The index's own (:meth:`~cacheblend_rag.retrieval.index.ChunkIndex.load_embedder`).
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
    """Says which text, by its number from 0, says what a sentence of an answer says, and where in the text: from ``start`` on."""

    text: int
    start: int
    end: int


def said_by(sentence: str, question: str, texts: Sequence[str]) -> Saying | None:
    """Return where the sentence of an answer is said; None where no text says it.

    Words are compared, not meanings: a text says it if one of its sentences holds more than half of the telling words that the
    answer's sentence has and the question has not. Of several, the one with most words of the question is taken.

    Args:
        sentence: The answer's sentence.
        question: What was asked; an answer repeats words of it, and so do texts that do not answer it.
        texts: The sources, the most relevant first, which goes first where several say it as much.
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
    """Return an answer with ``[1]`` behind each sentence that the first of ``texts`` says, and so on; and where they say it.

    Example:
        >>> with_marks("She is from Seldale. I guess.", "Who is Ada?", ["Ada's home was Seldale."])
        ('She is from Seldale. [1] I guess.', (Saying(text=0, start=0, end=23),))
    """
    if "```" in answer:  # in code a mark would be code
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
