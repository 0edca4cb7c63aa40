"""Finds the spans of a sentence to mask: those that need knowledge of the world to fill in (paper section 3.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any, Literal

from cacheblend_lab.realm.passages import Span

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
