"""Answers questions with a span reader (paper section 3.2), and counts right answers and recalls, with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cacheblend_lab.intervals import share_interval
from cacheblend_lab.realm.index import PassageIndex
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Inputs, Passage, Query, Tokenized, tokenize
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.runs import Say
from cacheblend_rag.calibrate.metrics import normalize
from cacheblend_rag.errors import InputError

_SPANS_READ = 50


@dataclass(frozen=True)
class SpanAnswer:
    """Holds the answer to one question.

    Attributes:
        text: The answer; empty if no passage has a span.
        probability: p(y|x), summed over the spans of all passages with this text, after SQuAD's normalisation.
        passages: Numbers of the retrieved passages, best first.
    """

    text: str
    probability: float
    passages: list[int]


class Library:
    """Holds passages as texts, as word pieces, and in an index."""

    def __init__(self, passages: Sequence[Passage], index: PassageIndex, model: RealmModel):
        """Tokenize the passages."""
        self.passages, self.index = passages, index
        self.tokenized: list[Tokenized] = tokenize_for(model, passages)

    def matches(self, question: RealmQuestion, passage: int, longest: int) -> list[tuple[int, int]]:
        """Return S(z,y): first piece and number of pieces of each span that is an answer, up to ``longest`` pieces."""
        found = []
        tokens = self.tokenized[passage]
        for match in question.pattern.finditer(self.passages[passage].text):
            span = tokens.pieces(*match.span())
            if span is not None and span[1] - span[0] < longest:
                found.append((span[0], span[1] - span[0] + 1))
        return found


def tokenize_for(model: RealmModel, passages: Sequence[Passage]) -> list[Tokenized]:
    """Return passages as the model's word pieces, cut to the model's passage length."""
    return tokenize(passages, model.tokenizer, model.shape.passage_tokens)


def as_queries(model: RealmModel, questions: Sequence[RealmQuestion]) -> list[Query]:
    """Return questions as the model's word pieces."""
    return [Query.question(question.text, model.tokenizer, model.shape.query_tokens) for question in questions]


def search(index: PassageIndex, vectors: Tensor, k: int) -> list[list[int]]:
    """Return the ``k`` best passages for each question's vector; fewer for all if an inexact index finds fewer."""
    found = index.search(vectors, k)
    fewest = min(map(len, found))
    return [row[:fewest] for row in found]


def retrieve(model: RealmModel, library: Library, queries: Inputs, k: int) -> tuple[list[list[int]], Tensor]:
    """Return each question's ``k`` best passages, and f(x, z), ``[questions, k]``, with gradients to the query tower."""
    vectors = model.query(queries)
    rows = search(library.index, vectors, k)
    return rows, model.relevance(vectors, library.index.vectors(rows).to(vectors.device))


def read(
    model: RealmModel, library: Library, collator: Collator, queries: Sequence[Query], rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Inputs]:
    """Return log p(span|z,x) of question and passage, ``[pairs, tokens, span_tokens]``, and the encoder's inputs."""
    pairs = collator.pairs(
        [query for query, row in zip(queries, rows, strict=True) for _ in row],
        [library.tokenized[at] for row in rows for at in row],
    )
    return model.reader(model.states(pairs), pairs.readable()), pairs


def answer_likelihood(
    spans: Tensor, pairs: Inputs, library: Library, questions: Sequence[RealmQuestion], rows: Sequence[Sequence[int]]
) -> Tensor:
    """Return log p(y|z,x) = log of the sum over S(z,y): ``[questions, passages]``; minus infinity without a match."""
    begins = pairs.bodies[:, 0].tolist()
    found: list[list[tuple[int, int]]] = [
        library.matches(question, at, spans.shape[2])
        for question, row in zip(questions, rows, strict=True)
        for at in row
    ]
    most = max(1, *map(len, found))
    # A finite value instead of minus infinity: an empty sum then has a gradient of 0 and not of NaN.
    values = spans.new_full((len(found), most), -1e30)
    chosen = [
        (pair, number, begins[pair] + first, length - 1)
        for pair, matches in enumerate(found)
        for number, (first, length) in enumerate(matches)
    ]
    if chosen:
        pair, number, first, length = torch.tensor(chosen, device=spans.device).T
        values = values.index_put((pair, number), spans[pair, first, length])
    total = values.logsumexp(1)
    none = torch.tensor([not matches for matches in found], device=spans.device)
    return total.masked_fill(none, -torch.inf).view(len(rows), -1)


@torch.no_grad()
def answer(
    model: RealmModel, library: Library, collator: Collator, questions: Sequence[RealmQuestion], k: int
) -> list[SpanAnswer]:
    """Answer questions from the ``k`` best passages of each."""
    queries = as_queries(model, questions)
    rows, relevance = retrieve(model, library, collator.queries(queries), k)
    if not rows[0]:
        return [SpanAnswer("", 0.0, row) for row in rows]
    spans, pairs = read(model, library, collator, queries, rows)
    prior = relevance.softmax(-1).flatten()
    joint = (spans.exp() * prior[:, None, None]).view(len(rows), len(rows[0]), -1)
    width = spans.shape[2]
    begins = pairs.bodies[:, 0].view(len(rows), -1).tolist()
    found = []
    for number, row in enumerate(rows):
        texts: dict[str, float] = defaultdict(float)
        written: dict[str, str] = {}
        for place, at in enumerate(row):
            likely = joint[number, place].topk(min(_SPANS_READ, joint.shape[2]))
            for p, flat in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
                if p > 0:
                    first = flat // width - begins[number][place]
                    text = _text(library, at, first, flat % width)
                    texts[normalize(text)] += p
                    written.setdefault(normalize(text), text)
        best = max(texts, key=lambda text: texts[text], default="")
        found.append(SpanAnswer(written.get(best, ""), texts.get(best, 0.0), list(row)))
    return found


def _text(library: Library, passage: int, first: int, longer: int) -> str:
    offsets = library.tokenized[passage].offsets
    return library.passages[passage].text[offsets[first][0] : offsets[first + longer][1]]


RECALLS: Final = (1, 5, 20)
_BATCH = 16


def evaluate(
    model: RealmModel,
    library: Library,
    questions: Sequence[RealmQuestion],
    collator: Collator,
    k: int = 5,
    say: Say = lambda done, of, at: None,
) -> list[dict[str, Any]]:
    """Answer questions, and score each answer.

    Args:
        model: A fine-tuned model; for any other model only the recalls are meaningful.
        library: Passages to retrieve from.
        questions: Questions to answer.
        collator: The model's collator.
        k: Passages read for each question.
        say: Called after each batch.

    Returns:
        One row per question: ``question``, ``answer``, ``probability``, ``em`` and ``recall@k`` for :data:`RECALLS`.
        The recall counts the passages known to answer the question, or the passages that contain an answer if none is
        known.

    Raises:
        InputError: ``questions`` is empty.
    """
    if not questions:
        raise InputError("There are no questions to evaluate.")
    rows = []
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        answers = answer(model, library, collator, batch, k)
        found = retrieve_many(model, library, collator, batch)
        rows += [_row(*each, library) for each in zip(batch, answers, found, strict=True)]
        say(len(rows), len(questions), "")
    return rows


def retrieve_many(
    model: RealmModel, library: Library, collator: Collator, questions: Sequence[RealmQuestion]
) -> list[list[int]]:
    """Return the passages of each question, best first: as many as the largest recall needs."""
    with torch.no_grad():
        vectors = model.query(collator.queries(as_queries(model, questions)))
    return library.index.search(vectors, max(RECALLS))


def summary(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> dict[str, Any]:
    """Return the mean of each score of :func:`evaluate` with its 95% interval.

    Args:
        rows: Rows of :func:`evaluate`, or other rows with some of its scores.
        groups: Group of each row; questions of one group are not independent.
    """
    found: dict[str, Any] = {"questions": len(rows)}
    for name in (name for name in ("em", *(f"recall@{k}" for k in RECALLS)) if name in rows[0]):
        values = [float(row[name]) for row in rows]
        low, high = share_interval(values, groups)
        found[name] = {"mean": sum(values) / len(values), "low": low, "high": high}
    return found


def _row(question: RealmQuestion, said: SpanAnswer, found: Sequence[int], library: Library) -> dict[str, Any]:
    if question.passages:
        hits = [at in question.passages for at in found]
    else:
        hits = [question.pattern.search(library.passages[at].text) is not None for at in found]
    recalls = {f"recall@{k}": float(any(hits[:k])) for k in RECALLS}
    return {
        "question": question.text,
        "answer": said.text,
        "probability": said.probability,
        "em": question.right(said.text),
        **recalls,
    }
