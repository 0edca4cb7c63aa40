"""Calibrates a model: finds the least compute whose answers agree with full recompute, and returns the profile.

1. *Standard*: if a blend must come as near as weights of few bits, the KL of these weights is measured first, on the
   same prompts. If a blend must answer the user's questions as well, full recompute's score is measured first; a blend
   then gives answers of its own.
2. *Layers*: on the first prompts the KV deviation of every layer is compared with the deviation of all layers. A layer
   is offered as check layer if it is shallow enough to pay, finds clearly more than the layers before it, and sees
   enough tokens deviate.
3. *Search*: candidates (policy, ratio, check layers) are tried for the least compute. Compute counts everything that a
   blend computes: dense pass, the question's pass, chosen and forced tokens. See
   :mod:`cacheblend_rag.calibrate.search`.
4. *Verdict*: the first candidate that holds the standard on all prompts becomes the profile, or a ratio some steps
   above it that also holds, as a margin for text unlike the prompts. If no candidate holds, the profile says not to
   blend and to use prefix caching, which loses nothing.
5. With fewer prompts than :attr:`Standard.needed`, or after an early stop, the cheapest candidate is taken that holds
   on the measured prompts, by agreement and by KL. The result is marked as not shown.

Measurements go to a ledger, so that a stopped calibration can resume. Each candidate's bound holds for that candidate
alone: of many candidates that nearly hold, one may pass by luck, more often than a single candidate would.
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
    """Holds a RAG prompt, the token ids that follow it (empty if the model answers), and the judge of its answers, if any."""

    prompt: TokenizedPrompt
    continuation: tuple[int, ...] = ()
    judge: Judge | None = None


@dataclass(frozen=True)
class MeasuredCandidate:
    """Holds one candidate's figures.

    Attributes:
        policy: Name of the policy.
        ratio: Recompute ratio.
        check_layers: Check layers; empty if the policy measures no KV deviation.
        widths: Size of the token set at each check layer, as multiples of the ratio.
        compute: Compute of the candidate's blends, as a share of the prompts' tokens through all layers.
        agreement: Agreement with full recompute, by the standard.
        kl: Mean KL, in nats, over tokens and prompts.
        prompts: Number of prompts that the candidate was measured on.
        complete: Whether the candidate was measured on all prompts. If not, the figures above are of the first prompts,
            on which every candidate was tried.
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
        """Return policy, ratio and check layers in words."""
        return in_words(self.policy, self.ratio, self.check_layers)


@dataclass(frozen=True)
class Calibration:
    """Holds the measurements and the resulting profile.

    Attributes:
        profile: The profile to use from now on.
        verdict: ``"shown"``, ``"not shown"`` (the best evidence of too few prompts or of a stopped calibration), or
            ``"do not blend"``.
        why: The verdict in words.
        standard: The standard that a blend had to reach.
        prompts: Number of prompts.
        tokens: Number of compared answer tokens.
        needed: Number of prompts that show that the standard holds, if no token disagrees.
        chosen: The candidate in the profile; None if the verdict is not to blend.
        measured: Every candidate that was tried, by compute.
        layers: The finding of every layer from 1 on.
        stopped: Whether the calibration was stopped before its end.
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
    """Measure ``prompts`` and choose a profile by the rules of this module.

    A KeyboardInterrupt ends the calibration with the best candidate so far, or is raised if there is no candidate.

    Args:
        subject: The model.
        rope: The model's rotation.
        header_ids: Token ids that chunks are precomputed behind.
        prompts: RAG prompts of at least two chunks each.
        standard: The standard that a blend must reach; None for 99% of tokens with 95% confidence.
        end_token: Token id that ends an answer.
        progress: Called before each step with work done, estimated total (both in full recomputes) and a line of text.
        probe: Token ids that chunks are ranked behind; without them, policies that need static deviations are left out.
        planner: Source of the chunks' KV; None computes the KV of all chunks here and holds it in memory.
        margin: Steps of :data:`RATIOS` above the least ratio that holds; used if the higher ratio holds, too.
        everything: Measure the candidates that cost more than the chosen one, too, on the first prompts.
        by_deviation: Try hkvd, too, for which the KV deviation of every layer is measured first.
        coarser: Computes logits with weights of ``standard.bits`` bits.
        ledger: Holds earlier measurements and receives new ones.

    Raises:
        InputError: No prompt has two chunks, so that no token has stale KV.
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
    """Return the number of prompts that count when a standard is to be shown: prompts with equal chunks count once."""
    return len(set(map(_group, _usable(prompts))))


def _usable(prompts: Sequence[CalibrationPrompt]) -> list[CalibrationPrompt]:
    return [each for each in prompts if len(each.prompt.spans) > 1]


def _group(each: CalibrationPrompt) -> str:
    return "|".join(sorted({span.chunk.id for span in each.prompt.spans}))


def _measured_standard(
    standard: Standard, made: Prompts, coarser: Coarser | None, say: Callable[[str], None]
) -> Standard:
    """Return the standard with the measurements that it refers to: the KL of coarser weights, or full recompute's score."""
    if standard.metric:
        scores = []
        for number in range(made.count):
            say(f"prompt {number + 1} of {made.count}: full recompute")
            scores.append(made.score(number))
        return standard.scored(scores)
    if (bits := standard.bits) is None:
        return standard
    assert coarser is not None  # without it the agreement could not be measured
    found = []
    for number in range(made.count):
        say(f"prompt {number + 1} of {made.count}: full recompute, and by weights of {bits} bits")
        found.append(made.by_weights(number, bits, coarser))
    return standard.measured(found)


def _what_to_try(
    num_layers: int, made: Prompts, by_deviation: bool, say: Callable[[str], None]
) -> tuple[list[Candidate], list[LayerFinding]]:
    """Return the candidates, and what was found for each layer, from the first prompts."""
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
    """Return the least trial that holds, the chosen trial, and whether the search was stopped."""
    least = None
    try:
        least = search.run()
        chosen = least and search.step_above(least, margin)
    except KeyboardInterrupt:
        if (best := least or search.best_so_far()) is None:
            raise
        return None, best, True
    if everything:
        with suppress(KeyboardInterrupt):  # the other candidates do not change the result
            search.look_at_rest()
    return least, chosen, False


def _teller(made: Prompts, progress: Progress | None) -> Callable[[str], None]:
    """Return a function that reports a line of text with the work done and the estimated total."""
    count = made.count
    looks = min(LOOK, count)
    # Measuring a prompt, its KV and its reference; looks at some candidates; the other prompts for two or three
    # candidates.
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
    # Chunks without a static ranking are blended by hkvd, which needs a check layer with any chosen policy.
    deepest = max((each.layer for each in layers if each.offered), default=1)
    spare = BlendSchedule((deepest,), (1.0,))
    if chosen is None:
        return ModelProfile(check_layers=spare.check_layers, widths=spare.widths, reuse="prefix")
    candidate = chosen.candidate
    schedule = candidate.schedule if candidate.measures_deviation else spare
    return ModelProfile(candidate.ratio, candidate.policy, schedule.check_layers, schedule.widths)


def _text_range(chosen: Trial | None, left_out: Sequence[dict[str, float] | None]) -> TextRange | None:
    """Return mean and spread of the static deviation that the chosen ratio leaves out; None without a ratio or a ranking."""
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
    """Return the verdict in words; ``below`` names the least candidate that holds if ``found`` is a margin above it."""
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
    """Return in words the result of a calibration that was stopped."""
    assert found is not None
    tried = f"on {found.prompts} of {prompts} prompts, where it agrees {found.agreement.value:.1%}"
    return (
        f"stopped before its end: {found}, {found.compute:.1%} of full recompute's compute, is the best so far, {tried}"
    )
