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
5. With fewer prompts than :attr:`Standard.needed`, the cheapest candidate is taken that holds on them, by agreement and
   by KL. The result is marked as not shown.

Measurements go to a ledger, so that a stopped calibration can resume. Each candidate's bound holds for that candidate
alone: of many candidates that nearly hold, one may pass by luck, more often than a single candidate would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cacheblend_rag.blending.profile import ModelProfile, save_profile
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import TextRange
from cacheblend_rag.calibrate.candidates import RATIOS, Candidate, LayerFinding, examine_layers, list_candidates
from cacheblend_rag.calibrate.compared import Coarser, Planner, PromptMeasurement, planner_of
from cacheblend_rag.calibrate.ledger import Ledger, Prompts, key_of
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.calibrate.metrics import METRIC_NAMES, Judge
from cacheblend_rag.calibrate.rounding import rounded_logits
from cacheblend_rag.calibrate.search import LOOK, Search, Trial
from cacheblend_rag.calibrate.standard import Bounds, Standard
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.target import TransformersSubject
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import user_folder
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import open_store

Verdict = Literal["shown", "not shown", "do not blend"]
Progress = Callable[[float, int, str], None]
_LAYOUT = 2  # of the measurements in a ledger's file


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
        name: The candidate in words.
        policy: Name of the policy.
        ratio: Recompute ratio.
        check_layers: Check layers; empty if the policy measures no KV deviation.
        compute: Compute of the candidate's blends, as a share of the prompts' tokens through all layers.
        agreement: Agreement with full recompute, by the standard.
        kl: Mean KL, in nats, over tokens and prompts.
        prompts: Number of prompts that the candidate was measured on. If some are missing, the figures above are of the
            first prompts, on which every candidate was tried.
    """

    name: str
    policy: str
    ratio: float
    check_layers: tuple[int, ...]
    compute: float
    agreement: Bounds
    kl: float
    prompts: int


@dataclass(frozen=True)
class Calibration:
    """Holds the measurements and the resulting profile.

    Attributes:
        profile: The profile to use from now on.
        verdict: ``"shown"``, ``"not shown"`` (the best evidence of too few prompts), or ``"do not blend"``.
        why: The verdict in words.
        standard: The standard that a blend had to reach.
        prompts: Number of prompts.
        tokens: Number of compared answer tokens.
        needed: Number of prompts that show that the standard holds, if no token disagrees.
        chosen: The candidate in the profile; None if the verdict is not to blend.
        measured: Every candidate that was tried, by compute.
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


def calibrate_engine(
    engine: TransformersEngine,
    prompts: Sequence[CalibrationPrompt],
    output: Path | None = None,
    progress: Progress | None = None,
    standard: Standard | None = None,
    *,
    margin: int = 0,
    by_deviation: bool = True,
) -> tuple[Calibration, Path]:
    """Calibrate the model of ``engine`` and write its profile; engines opened afterwards use the profile.

    Measurements are stored among the user's files until the calibration is complete: after a stop, the same call
    resumes.

    Args:
        engine: The model; its parity gate must have passed. Its store and registry are left unchanged.
        prompts: RAG prompts; see :func:`cacheblend_rag.calibrate.prompts.collect_prompts`.
        output: Directory of the model, or of its KV writer, to write the profile into; None for the user's files.
        progress: See :func:`calibrate`.
        standard: See :func:`calibrate`.
        margin: See :func:`calibrate`.
        by_deviation: See :func:`calibrate`.

    Returns:
        The calibration, and the path of the profile.

    Raises:
        ModelError: The model is not blended.
        InputError: No prompt is usable, there is no ratio to find, or the profile cannot be written.
    """
    planner = planner_of(engine)
    assert engine.rope is not None
    if engine.profile.blockwise:
        why = "this model was trained for chunks by themselves (blockwise): there is no ratio to find"
        raise InputError(f"{engine.profile.origin} says that {why}.")
    end = getattr(engine.tokenizer, "eos_token_id", None)
    coarser = None if standard is None or standard.bits is None else rounded_logits(engine.runner.model, standard.bits)
    ledger = Ledger(user_folder("cache") / "calibrations" / f"{_measured_by(engine, end)}.jsonl")

    # This store lies in RAM and has a budget: evicted KV is computed again when it is needed.
    kept = engine.store, engine.ranking, engine.registry
    engine.store, engine.ranking, engine.registry = open_store(), "now", ChunkRegistry()
    try:
        found = calibrate(
            engine.subject(), engine.rope, prompts, planner, standard, end, progress,
            margin=margin, by_deviation=by_deviation, coarser=coarser, ledger=ledger,
        )  # fmt: skip
    finally:
        engine.store, engine.ranking, engine.registry = kept
    try:
        file = save_profile(found.profile, engine.fingerprint.digest, output, engine.writer)
    except OSError as error:
        raise InputError(
            f"The profile cannot be written ({error}). What was measured is kept: give another directory (--output), and the "
            "same command goes on."
        ) from error
    ledger.remove()  # the profile is saved
    return found, file


def _measured_by(engine: TransformersEngine, end_token: int | None) -> str:
    """Return a hash of the model, the KV writer, the header, the end token and the versions that measurements depend on."""
    machine = describe_machine(engine.runner.device)
    versions = {name: value for name, value in machine.items() if "memory" not in name and name != "threads"}
    writer = None if engine.writer is None else engine.writer.digest
    told = (_LAYOUT, engine.fingerprint.digest, writer, tuple(engine.header_ids), end_token, sorted(versions.items()))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def calibrate(
    subject: TransformersSubject,
    rope: Rope,
    prompts: Sequence[CalibrationPrompt],
    planner: Planner,
    standard: Standard | None = None,
    end_token: int | None = None,
    progress: Progress | None = None,
    *,
    margin: int = 0,
    by_deviation: bool = True,
    coarser: Coarser | None = None,
    ledger: Ledger | None = None,
) -> Calibration:
    """Measure ``prompts`` and choose a profile by the rules of this module.

    Args:
        subject: The model.
        rope: The model's rotation.
        prompts: RAG prompts of at least two chunks each.
        planner: Source of the chunks' KV.
        standard: The standard that a blend must reach; None for 99% of tokens with 95% confidence.
        end_token: Token id that ends an answer.
        progress: Called before each step with work done, estimated total (both in full recomputes) and a line of text.
        margin: Steps of :data:`RATIOS` above the least ratio that holds; used if the higher ratio holds, too.
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
            subject, rope, each.prompt, planner, end_token, continuation=each.continuation, judge=each.judge
        )

    made = Prompts(measure, [key_of(each.prompt, each.continuation, each.judge) for each in usable], ledger or Ledger())
    say = _teller(made, progress)
    standard = _measured_standard(standard, made, coarser, say)
    candidates, layers = _what_to_try(subject.num_layers, made, by_deviation, say)
    search = Search(candidates, list(map(_group, usable)), standard, made.compare, say)
    least = search.run()
    chosen = least and search.step_above(least, margin)
    measured = sorted((_measured(trial, standard) for trial in search.trials), key=lambda m: m.compute)
    found = None if chosen is None else _measured(chosen, standard)
    below = "" if least is None or least is chosen else str(least.candidate)
    why = _words(found, below, measured, standard, independent(usable), search.enough_prompts)
    verdict: Verdict = "do not blend" if found is None else "shown" if search.enough_prompts else "not shown"
    summary: dict[str, Any] = {"verdict": verdict, "why": why, "prompts": made.count, "standard": asdict(standard)}
    if found is not None:
        summary |= {"agreement": asdict(found.agreement), "compute": found.compute, "kl": found.kl}
    profile = replace(_profile(chosen, layers), calibrated=summary, text=_text_range(chosen, made))
    tokens = max((sum(len(c.agrees) for _, c in trial.results) for trial in search.trials), default=0)
    return Calibration(profile, verdict, why, standard, made.count, tokens, standard.needed, found, measured)


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
    bits, scores, near = standard.bits, [], []
    if bits is None and not standard.metric:
        return standard
    for number in range(made.count):
        weights = "" if bits is None else f", and by weights of {bits} bits"
        say(f"prompt {number + 1} of {made.count}: full recompute{weights}")
        if bits is None:
            scores.append(made.score(number))
        else:
            assert coarser is not None  # without it the agreement could not be measured
            near.append(made.by_weights(number, bits, coarser))
    return standard.scored(scores) if bits is None else standard.measured(near)


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
    stale = float(np.mean([each.stale / each.tokens for each in facts]))
    forced = float(np.mean([each.forced / each.tokens for each in facts]))
    ranked = all(each.left_out is not None for each in facts)
    return list_candidates(layers, num_layers, stale, forced, ranked=ranked), layers


def _teller(made: Prompts, progress: Progress | None) -> Callable[[str], None]:
    """Return a function that reports a line of text with the work done and the estimated total."""
    count = made.count
    looks = min(LOOK, count)
    # Measuring a prompt, its KV and its reference; looks at some candidates; the other prompts for two or three
    # candidates.
    expected = 4.2 * count + 3.0 * looks + 1.2 * (count - looks)

    def say(text: str) -> None:
        if progress is not None:
            progress(made.done, ceil(max(expected, made.done + 1)), text)

    return say


def _profile(chosen: Trial | None, layers: Sequence[LayerFinding]) -> ModelProfile:
    # Chunks without a static ranking are blended by hkvd, which needs a check layer with any chosen policy.
    deepest = max((each.layer for each in layers if each.offered), default=1)
    if chosen is None:
        return ModelProfile(check_layers=(deepest,), reuse="prefix")
    each = chosen.candidate
    if each.check_layers:
        return ModelProfile(each.ratio, each.policy, each.check_layers, each.widths)
    return ModelProfile(each.ratio, each.policy, (deepest,))


def _text_range(chosen: Trial | None, made: Prompts) -> TextRange | None:
    """Return mean and spread of the static deviation that the chosen ratio leaves out; None without a ratio or a ranking."""
    if chosen is None or not chosen.candidate.ratio:
        return None
    left_out = [made.facts(number).left_out for number in range(made.count)]
    shares = [each[str(chosen.candidate.ratio)] for each in left_out if each is not None]
    return TextRange(float(np.mean(shares)), float(np.std(shares))) if shares else None


def _measured(trial: Trial, standard: Standard) -> MeasuredCandidate:
    each = trial.candidate
    agreement, prompts = standard.bounds(trial.fair_results), len(trial.results)
    return MeasuredCandidate(
        str(each), each.policy, each.ratio, each.check_layers, trial.compute, agreement, trial.kl, prompts
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
        holds = f"{found.name}, {found.compute:.1%} of full recompute's compute,"
        first, last = ("", f"; the least that does is {below}") if below else ("is the least that ", "")
        if shown:
            return f"{holds} {first}holds {goal} (bound {_bound(found, standard)}){last}"
        agrees = f"agrees {found.agreement.value:.1%} with a KL of {found.kl:.2g} nats"
        if standard.metric:
            agrees = f"keeps {found.agreement.value:.1%}"
        return f"{few}. On these {holds} {first}{agrees}{last}"
    best = max(measured, key=lambda each: each.agreement.value)
    tried = f"the best seen is {best.name} with {best.agreement.value:.1%}"
    if shown:
        return f"do not blend this: nothing up to a ratio of {RATIOS[-1]:.0%} holds {goal}; {tried}"
    return f"{few}. Even on these nothing up to a ratio of {RATIOS[-1]:.0%} agrees so much; {tried}: not blended until shown"


def _bound(found: MeasuredCandidate, standard: Standard) -> str:
    low = found.agreement.low
    return f"{low:.2%}" if standard.bits is None else f"{-np.log(low):.2g}"
