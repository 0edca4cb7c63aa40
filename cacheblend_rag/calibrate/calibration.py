"""Calibrates a model: finds the least compute whose answers agree with full recompute, and writes the profile.

1. *Standard*: where a blend is to be as near as weights of few bits, these are measured first, on the same prompts; where it
   is to answer the user's questions as well, full recompute's score. A blend then gives answers of its own.
2. *Layers*: on the first prompts the KV deviation of every layer is compared with that of all layers. Check layers are offered
   where they are shallow enough to pay, find clearly more than the layers before them, and see enough tokens deviate at all.
3. *Search*: candidates (policy, ratio, check layers) are tried for the least compute; compute counts everything that a blend
   computes: dense pass, the question's pass, chosen and forced tokens. See :mod:`cacheblend_rag.calibrate.search`.
4. *Verdict*: the first that holds the standard on all prompts is the profile, or a ratio some steps above it that holds as well,
   as a margin for text that the prompts do not show. If none does, the profile says not to blend: prefix caching, which loses
   nothing.
5. With fewer prompts than could show it (:attr:`Standard.needed`), or stopped early, the cheapest is taken that holds on those
   there are, by agreement and by KL; it is marked as not shown.

What is measured goes to a ledger, so that a calibration that was stopped goes on where it was. A candidate's bound is its own:
of many candidates that nearly hold, one may pass by luck, more often than a single one would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Literal

import numpy as np

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import BlendSchedule, TextRange
from cacheblend_rag.calibrate.candidates import (
    RATIOS,
    Candidate,
    LayerFinding,
    examine_layers,
    in_words,
    list_candidates,
)
from cacheblend_rag.calibrate.compared import Coarser, Planner, PromptMeasurement
from cacheblend_rag.calibrate.judge import METRIC_NAMES, Judge
from cacheblend_rag.calibrate.ledger import Ledger, Prompts, key_of
from cacheblend_rag.calibrate.search import LOOK, Search, Trial
from cacheblend_rag.calibrate.standard import Bounds, Standard
from cacheblend_rag.engines.transformers.target import TransformersSubject
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt

Verdict = Literal["shown", "not shown", "do not blend"]
Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class CalibrationPrompt:
    """Holds a RAG prompt and, if it is not to be answered, the token ids that follow it; who judges its answers, if anybody."""

    prompt: TokenizedPrompt
    continuation: tuple[int, ...] = ()
    judge: Judge | None = None


@dataclass(frozen=True)
class MeasuredCandidate:
    """Holds one candidate's figures.

    Attributes:
        policy: Its policy.
        ratio: Its recompute ratio.
        check_layers: Its check layers; empty where the policy measures no KV deviation.
        widths: Of the set at each, as multiples of the ratio.
        compute: What it computed, as a share of the prompts' tokens through all layers.
        agreement: With full recompute, by the standard.
        kl: Mean KL, in nats, over tokens and prompts.
        prompts: Prompts it was measured on.
        complete: Whether those are all; if not, the figures above are of the first prompts, which every candidate was tried on.
    """

    policy: str
    ratio: float
    check_layers: tuple[int, ...]
    widths: tuple[float, ...]
    compute: float
    agreement: Bounds
    kl: float
    prompts: int
    complete: bool

    def __str__(self) -> str:
        """Return how it blends, in words."""
        return in_words(self.policy, self.ratio, self.check_layers)


@dataclass(frozen=True)
class Calibration:
    """Holds what was measured and what follows.

    Attributes:
        profile: What to use from now on.
        verdict: ``"shown"``, ``"not shown"`` (too few prompts, or stopped; the best evidence), or ``"do not blend"``.
        why: The verdict in words.
        standard: What a blend had to reach.
        prompts: Number of prompts.
        tokens: Number of their tokens that were compared.
        needed: Prompts it takes to show that the standard holds, if no token disagrees.
        chosen: What the profile says; None for not to blend.
        measured: Every candidate that was tried, by compute.
        layers: Every layer from 1 on.
        stopped: Whether it was stopped before its end.
    """

    profile: ModelProfile
    verdict: Verdict
    why: str
    standard: Standard
    prompts: int
    tokens: int
    needed: int
    chosen: MeasuredCandidate | None
    measured: list[MeasuredCandidate]
    layers: list[LayerFinding]
    stopped: bool = False


def calibrate(
    subject: TransformersSubject,
    rope: Rope,
    header_ids: Sequence[int],
    prompts: Sequence[CalibrationPrompt],
    standard: Standard | None = None,
    end_token: int | None = None,
    progress: Progress | None = None,
    probe: Sequence[int] = (),
    *,
    planner: Planner | None = None,
    margin: int = 0,
    everything: bool = False,
    by_deviation: bool = True,
    coarser: Coarser | None = None,
    ledger: Ledger | None = None,
) -> Calibration:
    """Measure ``prompts`` and choose a profile by the rules above.

    A KeyboardInterrupt ends it with the best so far, if there is any, else it is raised.

    Args:
        subject: The model.
        rope: Its rotation.
        header_ids: What chunks are precomputed behind.
        prompts: RAG prompts of at least two chunks each.
        standard: What a blend must reach; None for 99% of tokens with 95% confidence.
        end_token: Ends an answer.
        progress: Called before each step with how much is done, of about how much, in full recomputes, and a line of text.
        probe: What chunks are ranked behind; without one, policies that need that are left out.
        planner: Where the chunks' KV comes from; None computes it here and keeps it all.
        margin: Steps of :data:`RATIOS` above the least that holds; taken if that does.
        everything: Measure the candidates that cost more than the chosen one, too, on the first prompts.
        by_deviation: Try hkvd, too, for which the KV deviation of every layer is measured first.
        coarser: Computes by weights of ``standard.bits``.
        ledger: What was measured earlier, and gets what is measured now.

    Raises:
        InputError: No prompt holds a token with stale KV.
    """
    standard = standard or Standard()
    usable = _usable(prompts)
    if not usable:
        raise InputError("Calibration needs prompts of at least two chunks and a question behind them; there is none.")

    def measure(number: int) -> PromptMeasurement:
        each = usable[number]
        return PromptMeasurement(
            subject, rope, header_ids, each.prompt, end_token, probe,
            continuation=each.continuation, planner=planner, judge=each.judge,
        )  # fmt: skip

    made = Prompts(measure, [key_of(each.prompt, each.continuation, each.judge) for each in usable], ledger or Ledger())
    say = _teller(made, progress)
    standard = _measured_standard(standard, made, coarser, say)
    candidates, layers = _what_to_try(subject.num_layers, made, by_deviation, say)
    groups = list(map(_group, usable))
    search = Search(candidates, groups, standard, made.compare, say)
    least, chosen, stopped = _searched(search, margin, everything)
    return _conclude(search, chosen, least, standard, groups, made, layers, stopped)


def independent(prompts: Sequence[CalibrationPrompt]) -> int:
    """Return how many of the prompts count when a standard is to be shown: those of the same chunks count once."""
    return len(set(map(_group, _usable(prompts))))


def _usable(prompts: Sequence[CalibrationPrompt]) -> list[CalibrationPrompt]:
    return [each for each in prompts if len(each.prompt.spans) > 1]


def _group(each: CalibrationPrompt) -> str:
    return "|".join(sorted({span.chunk.id for span in each.prompt.spans}))


def _measured_standard(
    standard: Standard, made: Prompts, coarser: Coarser | None, say: Callable[[str], None]
) -> Standard:
    """Return a standard with what it is held to, which that of weights of few bits and of a metric get by being measured."""
    if standard.metric:
        scores = []
        for number in range(made.count):
            say(f"prompt {number + 1} of {made.count}: full recompute")
            scores.append(made.score(number))
        return standard.scored(scores)
    if (bits := standard.bits) is None:
        return standard
    assert coarser is not None  # or the agreement would be one that nobody has measured
    found = []
    for number in range(made.count):
        say(f"prompt {number + 1} of {made.count}: full recompute, and by weights of {bits} bits")
        found.append(made.by_weights(number, bits, coarser))
    return standard.measured(found)


def _what_to_try(
    num_layers: int, made: Prompts, by_deviation: bool, say: Callable[[str], None]
) -> tuple[list[Candidate], list[LayerFinding]]:
    """Return the candidates, and what each layer says, by the first prompts."""
    first = range(min(LOOK, made.count))
    layers: list[LayerFinding] = []
    if by_deviation:
        say("KV deviation of every layer")
        layers = examine_layers([made.layers(number) for number in first], num_layers)
    facts = [made.facts(number) for number in first]
    stale, forced = (
        float(np.mean([getattr(each, name) / each.tokens for each in facts])) for name in ("stale", "forced")
    )
    ranked = all(each.left_out is not None for each in facts)
    return list_candidates(layers, num_layers, stale, forced, ranked=ranked), layers


def _searched(search: Search, margin: int, everything: bool) -> tuple[Trial | None, Trial | None, bool]:
    """Return the least that holds, what is chosen, and whether the search was stopped."""
    least = None
    try:
        least = search.run()
        chosen = least and search.step_above(least, margin)
    except KeyboardInterrupt:
        if (best := least or search.best_so_far()) is None:
            raise
        return None, best, True
    if everything:
        with suppress(KeyboardInterrupt):  # the rest changes nothing
            search.look_at_rest()
    return least, chosen, False


def _teller(made: Prompts, progress: Progress | None) -> Callable[[str], None]:
    """Return what says a line of text, with how much is done of about how much."""
    count = made.count
    looks = min(LOOK, count)
    # A prompt, its KV and what it is held against; looks at some candidates; the rest of the prompts for two or three.
    expected = 4.2 * count + 3.0 * looks + 1.2 * (count - looks)

    def say(text: str) -> None:
        if progress is not None:
            progress(made.done, ceil(max(expected - made.kept, made.done + 1)), text)

    return say


def _conclude(
    search: Search,
    chosen: Trial | None,
    least: Trial | None,
    standard: Standard,
    groups: Sequence[str],
    made: Prompts,
    layers: list[LayerFinding],
    stopped: bool,
) -> Calibration:
    measured = sorted((_measured(trial, standard) for trial in search.trials), key=lambda m: m.compute)
    found = None if chosen is None else _measured(chosen, standard)
    shown = search.enough_prompts and not stopped
    verdict: Verdict = "do not blend" if found is None else "shown" if shown else "not shown"
    below = "" if least is None or least is chosen else str(least.candidate)
    why = _stopped(found, len(groups)) if stopped else _words(found, below, measured, standard, len(set(groups)), shown)
    tokens = max((sum(len(c.agrees) for _, c in trial.results) for trial in search.trials), default=0)
    summary: dict[str, Any] = {"verdict": verdict, "why": why, "prompts": len(groups), "standard": asdict(standard)}
    if found is not None:
        summary |= {"agreement": asdict(found.agreement), "compute": found.compute, "kl": found.kl}
    text = _text_range(chosen, [made.facts(number).left_out for number in range(len(groups) if chosen else 0)])
    profile = replace(_profile(chosen, layers), calibrated=summary, text=text)
    needed = standard.needed
    return Calibration(profile, verdict, why, standard, len(groups), tokens, needed, found, measured, layers, stopped)


def _profile(chosen: Trial | None, layers: Sequence[LayerFinding]) -> ModelProfile:
    # Chunks without a ranking are blended by hkvd, which needs a check layer whatever was chosen.
    deepest = max((each.layer for each in layers if each.offered), default=1)
    spare = BlendSchedule((deepest,), (1.0,))
    if chosen is None:
        return ModelProfile(check_layers=spare.check_layers, widths=spare.widths, reuse="prefix")
    candidate = chosen.candidate
    schedule = candidate.schedule if candidate.measures_deviation else spare
    return ModelProfile(candidate.ratio, candidate.policy, schedule.check_layers, schedule.widths)


def _text_range(chosen: Trial | None, left_out: Sequence[dict[str, float] | None]) -> TextRange | None:
    """Return what the chosen ratio leaves out in these prompts; None where they say nothing about it."""
    if chosen is None or not chosen.candidate.ratio:
        return None
    shares = [each[str(chosen.candidate.ratio)] for each in left_out if each is not None]
    return TextRange(float(np.mean(shares)), float(np.std(shares))) if shares else None


def _measured(trial: Trial, standard: Standard) -> MeasuredCandidate:
    candidate = trial.candidate
    checks = candidate.measures_deviation
    return MeasuredCandidate(
        candidate.policy,
        candidate.ratio,
        candidate.schedule.check_layers if checks else (),
        candidate.schedule.widths if checks else (),
        trial.compute,
        standard.bounds(trial.fair_results),
        trial.kl,
        len(trial.results),
        not trial.left,
    )


def _words(
    found: MeasuredCandidate | None,
    below: str,
    measured: Sequence[MeasuredCandidate],
    standard: Standard,
    groups: int,
    shown: bool,
) -> str:
    """Return the verdict in words; ``below`` names the least that holds where ``found`` is a margin above it."""
    sure = f"at {100 * standard.confidence:.4g}% confidence"
    goal, least = f"{100 * standard.agreement:.6g}% agreement with full recompute {sure}", ", if no token disagrees"
    if standard.bits is not None:
        goal, least = f"no more than the KL of weights of {standard.bits} bits, {standard.most_kl:.2g} nats, {sure}", ""
    if standard.metric:
        goal = (
            f"{METRIC_NAMES[standard.metric]} no more than {1 - standard.agreement:.1%} below full recompute's "
            f"{standard.full:.1%} {sure}"
        )
        least = ", if no answer is worse"
    few = f"{groups} prompts without common chunks cannot show {goal}: that takes {standard.needed}{least}"
    if found is not None:
        holds = f"{found}, {found.compute:.1%} of full recompute's compute,"
        first, last = ("", f"; the least that does is {below}") if below else ("is the least that ", "")
        if shown:
            return f"{holds} {first}holds {goal} (bound {_bound(found, standard)}){last}"
        agrees = f"agrees {found.agreement.value:.1%} with a KL of {found.kl:.2g} nats"
        if standard.metric:
            agrees = f"keeps {found.agreement.value:.1%}"
        return f"{few}. On these {holds} {first}{agrees}{last}"
    best = max(measured, key=lambda each: each.agreement.value)
    tried = f"the best seen is {best} with {best.agreement.value:.1%}"
    if shown:
        return f"do not blend this: nothing up to a ratio of {RATIOS[-1]:.0%} holds {goal}; {tried}"
    return f"{few}. Even on these nothing up to a ratio of {RATIOS[-1]:.0%} agrees so much; {tried}: not blended until shown"


def _bound(found: MeasuredCandidate, standard: Standard) -> str:
    low = found.agreement.low
    return f"{low:.2%}" if standard.bits is None else f"{-np.log(low):.2g}"


def _stopped(found: MeasuredCandidate | None, prompts: int) -> str:
    """Return in words what a calibration that was stopped had found."""
    assert found is not None
    tried = f"on {found.prompts} of {prompts} prompts, where it agrees {found.agreement.value:.1%}"
    return (
        f"stopped before its end: {found}, {found.compute:.1%} of full recompute's compute, is the best so far, {tried}"
    )
