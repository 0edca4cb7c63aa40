"""Compares the methods on the bundled questions, and on passages of documents, with the same chunks for each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from cacheblend_lab.intervals import mean_interval
from cacheblend_lab.measure import take_turns
from cacheblend_rag.blending.settings import BLEND, BlendSettings, FuseOptions
from cacheblend_rag.calibrate.calibration import CalibrationPrompt
from cacheblend_rag.calibrate.compared import PromptMeasurement, planner_of
from cacheblend_rag.calibrate.intervals import Interval
from cacheblend_rag.demo.bundle import DemoQuestion, bundled_questions
from cacheblend_rag.demo.methods import METHODS, answer_by_each_method
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
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


_Pairs = Sequence[tuple[float, float]]
_FULL = "full recompute"
_EXACT = (_FULL, "prefix caching")
_METHODS = {name: how for name, how in METHODS.items() if how is not BLEND}
_METHODS |= {f"blend, {how.quality}": how for how in (BlendSettings(quality="fast"), BLEND)}


@dataclass(frozen=True)
class MethodOnDocuments:
    """Holds the cost and the accuracy of one method.

    Attributes:
        sooner: Time to first token of full recompute divided by the method's time, median over prompts.
        compute: Computed share of a prompt's tokens through all layers, selection passes included.
        kl: KL(full recompute ‖ method) in nats, mean over the tokens that follow; 0 for an exact method.
        kl_interval: 95% interval of ``kl``; None if too few prompts, or equal values, allow none.
        agrees: Share of the following tokens with the same likeliest token.
        agrees_interval: 95% interval of ``agrees``; None as for ``kl_interval``.
        how: Policy and ratio of a blend.
    """

    sooner: float
    compute: float
    kl: float = 0.0
    kl_interval: Interval | None = None
    agrees: float = 1.0
    agrees_interval: Interval | None = None
    how: str = ""


def compare_on_documents(
    engine: TransformersEngine, prompts: Sequence[CalibrationPrompt], step: Callable[[int], None]
) -> dict[str, MethodOnDocuments]:
    """Return cost and accuracy of each method on the same prompts, in one run; missing KV of chunks is computed.

    Args:
        engine: The model, in front of an empty store.
        prompts: See :func:`cacheblend_rag.calibrate.prompts.collect_prompts`.
        step: Called with the number of each prompt before it.

    Raises:
        ModelError: The model is not blended.
    """
    planner, profile, layers = planner_of(engine), engine.profile, engine.num_layers
    assert engine.rope is not None  # planner_of has checked that the model is blended
    engine.ranking = "now"
    near = {name: profile.resolve(how, layers) for name, how in _METHODS.items() if name not in _EXACT}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _METHODS}
    nearness: dict[str, list[tuple[float, float]]] = {name: [] for name in near}
    for number, each in enumerate(prompts):
        step(number)
        measured = PromptMeasurement(
            engine.subject(), engine.rope, each.prompt, planner, continuation=each.continuation
        )
        for name, how in near.items():
            compared = measured.compare(how)
            nearness[name].append((fmean(compared.kl), fmean(compared.agrees)))
        for name in take_turns(_METHODS, number):
            engine.reset_prefix_cache()  # otherwise a method would reuse what the method before it has cached
            done = engine.generate(each.prompt, SamplingParams(max_tokens=1), _METHODS[name])
            compute = (done.usage.computed_tokens + done.usage.selection_tokens) / len(each.prompt.token_ids)
            found[name].append((done.timings.ttft_s, compute))
    return {name: _summed(found[_FULL], runs, nearness.get(name, []), near.get(name)) for name, runs in found.items()}


def _summed(full: _Pairs, runs: _Pairs, nearness: _Pairs, how: FuseOptions | None) -> MethodOnDocuments:
    sooner = median(whole / time for (whole, _), (time, _) in zip(full, runs, strict=True))
    compute = fmean(share for _, share in runs)
    if how is None:
        return MethodOnDocuments(sooner, compute)
    each, (kl, agrees) = [""] * len(nearness), zip(*nearness, strict=True)
    between = mean_interval(kl, each), mean_interval(agrees, each)
    named = f"({how.policy.name} {how.ratio:.0%})" if how.ratio else ""
    return MethodOnDocuments(sooner, compute, fmean(kl), between[0], fmean(agrees), between[1], named)
