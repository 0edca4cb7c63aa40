"""Makes the examples of pre-training: sentences with their passage, and sentences with masked spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from cacheblend_lab.realm.passages import MASKED_MOST, Passage, Query, Span, Tokenized, sentences

Spans = Literal["salient", "random"]
"""Kind of spans to mask; ``random`` is the paper's ablation: spans of a few words at random places, as in SpanBERT."""

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(
    rf"\b(?:\d{{1,2}}(?:st|nd|rd|th)? {_MONTH}(?:,? \d{{4}})?|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|{_MONTH}(?: \d{{4}})?|\d{{4}}-\d{{2}}-\d{{2}}|(?:1\d|20)\d{{2}}s?)\b"
)
_NAME = re.compile(r"\b[A-Z][\w’'-]*(?:(?: (?:of|de|von|van|da|la))? [A-Z][\w’'-]*)*")
# Capitalised first words of a sentence that are no names.
_NO_NAME = re.compile(
    "The|A|An|It|Its|He|She|His|Her|They|Their|We|Our|I|In|On|At|Of|And|But|Or|If|As|By|For|From|To|With|This|That|These|Those"
    "|There|When|Where|Who|What|Which|How|Some|Many|Most|Nobody|Not|No"
)
_SPACY_MODEL = "en_core_web_sm"
_NAMED = frozenset(["PERSON", "NORP", "FAC", "ORG", "GPE", "LOC", "PRODUCT", "EVENT", "WORK_OF_ART", "LAW", "DATE"])

Finder = Callable[[str], list[Span]]


def salient_finder() -> tuple[str, Finder]:
    """Return the name of a finder of entities and dates, and the finder.

    The finder is spaCy with ``en_core_web_sm`` if both are installed, else :func:`pattern_spans`.
    """
    try:
        import spacy

        nlp = spacy.load(_SPACY_MODEL)
    except (ImportError, OSError):
        return "patterns", pattern_spans
    return f"spacy:{_SPACY_MODEL}", lambda sentence: entity_spans(nlp(sentence))


def entity_spans(document: Any) -> list[Span]:
    """Return the named entities and dates of a spaCy document, and the dates that the date pattern finds."""
    named = [(e.start_char, e.end_char) for e in document.ents if e.label_ in _NAMED]
    return _apart([*named, *_dates(document.text)])


def pattern_spans(sentence: str) -> list[Span]:
    """Return dates and capitalised names of a sentence; a single capitalised word at the start is no name."""
    dates = _dates(sentence)
    names = []
    for match in _NAME.finditer(sentence):
        start, end = match.span()
        first, _, rest = match[0].partition(" ")
        if _NO_NAME.fullmatch(first):
            if not rest:
                continue
            start += len(first) + 1
        elif not rest and start == 0:
            continue
        names.append((start, end))
    return _apart([*dates, *names])


def random_spans(sentence: str, rng: Random) -> list[Span]:
    """Return one span of one to four words at a random place; an empty list if the sentence has no words."""
    words = [match.span() for match in re.finditer(r"\w+", sentence)]
    if not words:
        return []
    length = min(rng.choice((1, 1, 2, 3, 4)), len(words))
    first = rng.randrange(len(words) - length + 1)
    return [(words[first][0], words[first + length - 1][1])]


def _dates(sentence: str) -> list[Span]:
    return [match.span() for match in _DATE.finditer(sentence)]


def _apart(spans: list[Span]) -> list[Span]:
    """Return the spans in order, without spans that overlap an earlier span."""
    kept: list[Span] = []
    for start, end in sorted(spans):
        if not kept or start >= kept[-1][1]:
            kept.append((start, end))
    return kept


_DRAWS = 50
_KEEP_SENTENCE = 0.1
_TITLED = 0.5
_MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Masked:
    """Holds a query with masks, and the number of its source passage."""

    query: Query
    source: int


class Examples:
    """Draws examples from passages; equal random states draw equal examples."""

    def __init__(self, passages: Sequence[Passage], tokenized: Sequence[Tokenized], mask: int, query_tokens: int):
        """Set the passages to draw from."""
        self._passages, self._tokenized = passages, tokenized
        self._mask, self._size = mask, query_tokens

    def cloze(self, rng: Random, count: int) -> tuple[list[Query], list[Tokenized]]:
        """Draw ``count`` sentences, each with its passage, for the inverse cloze task (Lee et al., arXiv 1906.00300).

        Nine times of ten, the sentence is removed from the passage.
        """
        queries: list[Query] = []
        passages: list[Tokenized] = []
        while len(queries) < count:
            at = rng.randrange(len(self._passages))
            tokens = self._tokenized[at]
            start, end = rng.choice(sentences(self._passages[at].text))
            touched = tokens.pieces(start, end)
            if touched is None:  # the sentence lies behind the tokens that the model reads
                continue
            first, last = touched
            # Most sentences of an article refer to their subject as "it", so half of the queries include the title.
            about = tokens.title if rng.random() < _TITLED else []
            queries.append(Query([*about, *tokens.body[first : last + 1]][: self._size], [], []))
            if rng.random() >= _KEEP_SENTENCE:
                tokens = Tokenized(
                    tokens.title,
                    tokens.body[:first] + tokens.body[last + 1 :],
                    tokens.offsets[:first] + tokens.offsets[last + 1 :],
                )
            passages.append(tokens)
        return queries, passages

    def words(self, rng: Random, count: int) -> list[Masked]:
        """Draw ``count`` sentences with about 15% of their words masked in random spans, as in BERT's training."""
        found: list[Masked] = []
        while len(found) < count:
            at, span = self._sentence(rng)
            text = self._passages[at].text[span[0] : span[1]]
            wanted = _MASKED_SHARE * len(text.split())
            spans: list[Span] = []
            while len(spans) < max(1, wanted / 2) and (drawn := random_spans(text, rng)):
                spans += drawn
            if (query := self._query(at, span, spans)) is not None:
                found.append(Masked(query, at))
        return found

    def spans(self, rng: Random, count: int, finder: Finder | None) -> list[Masked]:
        """Draw sentences with one masked span: a span found by ``finder``, or a random span if ``finder`` is None.

        Returns fewer than ``count`` sentences if salient spans are rare.
        """
        found: list[Masked] = []
        for _ in range(count * _DRAWS):
            at, span = self._sentence(rng)
            text = self._passages[at].text[span[0] : span[1]]
            candidates = random_spans(text, rng) if finder is None else finder(text)
            # The title is part of the query, so a span from the title would be no test of knowledge.
            title = self._passages[at].title.lower()
            candidates = [(a, b) for a, b in candidates if text[a:b].lower() not in title]
            if not candidates:
                continue
            query = self._query(at, span, [rng.choice(candidates)])
            if query is not None and len(query.masked) <= MASKED_MOST:
                found.append(Masked(query, at))
            if len(found) == count:
                break
        return found

    def _sentence(self, rng: Random) -> tuple[int, Span]:
        at = rng.randrange(len(self._passages))
        return at, rng.choice(sentences(self._passages[at].text))

    def _query(self, at: int, sentence: Span, spans: Sequence[Span]) -> Query | None:
        """Return title and sentence with ``spans`` of the sentence masked; None if the model reads no masked token."""
        tokens = self._tokenized[at]
        touched = tokens.pieces(*sentence)
        if touched is None:
            return None
        first, last = touched
        ids = [*tokens.title, *tokens.body[first : last + 1]][: self._size]
        masked: set[int] = set()
        for start, end in spans:
            inside = tokens.pieces(sentence[0] + start, sentence[0] + end)
            if inside is not None:
                masked |= set(range(inside[0], inside[1] + 1))
        positions = [p for p in sorted(len(tokens.title) + piece - first for piece in masked) if p < len(ids)]
        if not positions:
            return None
        targets = [ids[p] for p in positions]
        for p in positions:
            ids[p] = self._mask
        return Query(ids, positions, targets)
