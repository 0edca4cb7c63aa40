"""Makes pre-training's examples: sentences with the passage around them, and sentences with masked spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cacheblend_lab.realm.inputs import MASKED_MOST, Query
from cacheblend_lab.realm.passages import Passage, Span, Tokenized, sentences
from cacheblend_lab.realm.salient import Finder, random_spans

_DRAWS = 50
_KEEP_SENTENCE = 0.1
_TITLED = 0.5
_MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Masked:
    """A query with masks, and the passage it was taken from."""

    query: Query
    source: int


class Examples:
    """Draws examples from passages; the same random state draws the same ones."""

    def __init__(self, passages: Sequence[Passage], tokenized: Sequence[Tokenized], mask: int, query_tokens: int):
        """Draw from these passages.

        Args:
            passages: The corpus.
            tokenized: The same as word pieces.
            mask: Id of the mask.
            query_tokens: Most word pieces of a query.
        """
        self._passages, self._tokenized = passages, tokenized
        self._mask, self._size = mask, query_tokens

    def cloze(self, rng: Random, count: int) -> tuple[list[Query], list[Tokenized]]:
        """Draw sentences, each with its passage, from which the sentence is taken out nine times of ten.

        This is the inverse cloze task (Lee et al., arXiv 1906.00300).
        """
        queries: list[Query] = []
        passages: list[Tokenized] = []
        while len(queries) < count:
            at = rng.randrange(len(self._passages))
            tokens = self._tokenized[at]
            start, end = rng.choice(sentences(self._passages[at].text))
            touched = tokens.pieces(start, end)
            if touched is None:  # behind what the model reads of the passage
                continue
            first, last = touched
            # A sentence of an article mostly says "it": half of the time the title says of what.
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
        """Draw sentences in which 15% of the word pieces are masked, in random spans, as BERT is trained."""
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
        """Draw sentences in which one span is masked: one that ``finder`` finds, or without one a random span.

        Fewer than ``count`` where salient spans are rare.
        """
        found: list[Masked] = []
        for _ in range(count * _DRAWS):
            at, span = self._sentence(rng)
            text = self._passages[at].text[span[0] : span[1]]
            candidates = random_spans(text, rng) if finder is None else finder(text)
            # What the title says is no knowledge.
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
        """Return title and sentence with ``spans`` of the sentence masked; None where they lie behind what the model reads."""
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
