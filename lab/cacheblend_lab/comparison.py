"""Answers the bundled questions by four methods, with the same retrieved chunks for each method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from cacheblend_rag.demo.bundle import DemoQuestion, bundled_questions
from cacheblend_rag.demo.methods import METHODS, answer_by_each_method
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.index import Hit

# Kinds of questions shown one by one, in this order; cross-chunk references come first, as the library's main purpose.
_SHOWN_KINDS = ("cross", "two_hop_cross", "single")
_SAMPLING = SamplingParams(max_tokens=24, stop=("\n",))


@dataclass(frozen=True)
class MethodAnswer:
    """Holds one method's answer; ``right`` ignores case, outer spaces and a full stop."""

    answer: str
    right: bool
    ttft_s: float
    computed_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class DemoRow:
    """Holds a question, the chunks retrieved for it, and the answers by method.

    Attributes:
        shown: Whether the row is one of the few to be shown on its own. It is the first of its kind that full recompute
            answers correctly and, where a reference crosses chunks, full KV reuse answers wrongly (if there is such a
            row). The blend's answer does not matter.
    """

    question: DemoQuestion
    sources: tuple[Hit, ...]
    prompt_tokens: int
    answers: dict[str, MethodAnswer]
    shown: bool = False

    @property
    def telling(self) -> bool:
        """Return whether full recompute is right and, for a reference across chunks, full KV reuse is wrong."""
        if not self.answers["full recompute"].right:
            return False
        return self.question.kind == "single" or not self.answers["full KV reuse"].right


@dataclass(frozen=True)
class MethodTotal:
    """Holds one method's totals: right answers, questions, median TTFT in seconds, mean tokens computed per prompt."""

    right: int
    questions: int
    ttft_s: float
    computed_tokens: float


def run_demo(pipeline: RagPipeline) -> Iterator[DemoRow]:
    """Answer every bundled question by every method; the rows to be shown come first.

    The corpus must be indexed in ``pipeline``. One question is answered first without a result, to warm up the
    libraries.
    """
    waiting = bundled_questions()
    if waiting:
        _compare(pipeline, waiting[0])
    for kind in _SHOWN_KINDS:
        held: list[DemoRow] = []
        for question in [q for q in waiting if q.kind == kind]:
            waiting.remove(question)
            held.append(_compare(pipeline, question))
            if held[-1].telling:
                break
        right = [row for row in held if row.answers["full recompute"].right]
        best = max(right, key=lambda row: row.telling, default=None)
        yield from (replace(row, shown=row is best) for row in held)
    for question in waiting:
        yield _compare(pipeline, question)


def totals(rows: Sequence[DemoRow]) -> dict[str, MethodTotal]:
    """Return the totals of ``rows`` by method."""
    found = {}
    for name in METHODS:
        answers = [row.answers[name] for row in rows]
        found[name] = MethodTotal(
            right=sum(answer.right for answer in answers),
            questions=len(answers),
            ttft_s=median(answer.ttft_s for answer in answers),
            computed_tokens=sum(answer.computed_tokens for answer in answers) / len(answers),
        )
    return found


def as_json(rows: Sequence[DemoRow]) -> dict[str, Any]:
    """Return rows and totals as plain data."""
    return {
        "questions": [
            {
                **asdict(row.question),
                "shown": row.shown,
                "prompt_tokens": row.prompt_tokens,
                "sources": [{"id": s.id, "path": s.path, "score": s.score, "text": s.text} for s in row.sources],
                "methods": {name: asdict(answer) for name, answer in row.answers.items()},
            }
            for row in rows
        ],
        "totals": {name: asdict(total) for name, total in totals(rows).items()},
    }


def _compare(pipeline: RagPipeline, question: DemoQuestion) -> DemoRow:
    found = pipeline.retrieve(question.question)
    prompt, _, _ = pipeline.prompt(question.question, found.hits, _SAMPLING)
    answers = {}
    tokens = 0
    for name, done in answer_by_each_method(pipeline.engine, prompt, _SAMPLING):
        tokens = done.usage.prompt_tokens
        answers[name] = MethodAnswer(
            answer=done.text.strip(),
            right=_plain(done.text) == _plain(question.answer),
            ttft_s=done.timings.ttft_s,
            computed_tokens=done.usage.computed_tokens,
            reused_tokens=done.usage.reused_tokens,
        )
    return DemoRow(question, found.hits, tokens, answers)


def _plain(text: str) -> str:
    return text.strip().rstrip(".").casefold()
