"""Calibrates a model: finds the least compute whose answers agree with full recompute, and writes the profile.

1. *Layers*: on the first prompts the KV deviation of every layer is compared with that of all layers. Check layers are offered
   where they are shallow enough to pay, find clearly more than the layers before them, and see enough tokens deviate at all.
2. *Search*: candidates (policy, ratio, check layers) are tried from the least compute on; compute counts everything that a blend
   computes: dense pass, ranking pass of the question, chosen and forced tokens. See :mod:`cacheblend_rag.lab.doctor.search`.
3. *Verdict*: the first that holds the standard on all prompts is the profile, or a ratio some steps above it that holds as well,
   as a margin for text that the prompts do not show. If none does, the profile says not to blend: prefix caching, which loses
   nothing.
4. With fewer prompts than could show it (:attr:`Standard.needed`), the cheapest is taken that holds on those there are, by
   agreement and by KL; it is marked as not shown.

A candidate's bound is its own: of many candidates that nearly hold, one may pass by luck, more often than a single one would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cacheblend_rag.blending.gate import GateSubject
from cacheblend_rag.blending.options import BlendSchedule, TextRange, left_out
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.profile import ModelProfile, save_profile
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.lab.doctor.candidates import RATIOS, LayerFinding, examine_layers, in_words, list_candidates
from cacheblend_rag.lab.doctor.compared import Planner, PromptMeasurement
from cacheblend_rag.lab.doctor.search import LOOK, Prompts, Search, Trial
from cacheblend_rag.lab.doctor.standard import Bounds, Standard
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import open_store

Verdict = Literal["shown", "not shown", "do not blend"]


@dataclass(frozen=True)
class CalibrationPrompt:
    """Holds a RAG prompt and, if it is not to be answered, the token ids that follow it."""

    prompt: TokenizedPrompt
    continuation: tuple[int, ...] = ()


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
        verdict: ``"shown"``, ``"not shown"`` (too few prompts; the best evidence), or ``"do not blend"``.
        why: The verdict in words.
        standard: What a blend had to reach.
        prompts: Number of prompts.
        tokens: Number of their tokens that were compared.
        needed: Prompts it takes to show that the standard holds, if no token disagrees.
        chosen: What the profile says; None for not to blend.
        measured: Every candidate that was tried, by compute.
        layers: Every layer from 1 on.
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

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def calibrate(
    subject: GateSubject,
    rope: Rope,
    header_ids: Sequence[int],
    prompts: Sequence[CalibrationPrompt],
    standard: Standard | None = None,
    end_token: int | None = None,
    progress: Callable[[str], None] | None = None,
    probe: Sequence[int] = (),
    *,
    planner: Planner | None = None,
    margin: int = 0,
    everything: bool = False,
) -> Calibration:
    """Measure ``prompts`` and choose a profile by the rules above.

    Args:
        subject: The model.
        rope: Its rotation.
        header_ids: What chunks are precomputed behind.
        prompts: RAG prompts of at least two chunks each.
        standard: What a blend must reach; None for 99% of tokens with 95% confidence.
        end_token: Ends an answer.
        progress: Called with a line of text before each step.
        probe: What chunks are ranked behind; without one, policies that rank at indexing are left out.
        planner: Where the chunks' KV comes from; None computes it here and keeps it all.
        margin: Steps of :data:`RATIOS` above the least that holds; taken if that holds as well.
        everything: Measure the candidates that cost more than the chosen one, too, on the first prompts.

    Raises:
        InputError: No prompt holds a token with stale KV.
    """
    say, standard = progress or (lambda line: None), standard or Standard()
    usable = [each for each in prompts if len(each.prompt.spans) > 1]
    if not usable:
        raise InputError("Calibration needs prompts of at least two chunks and a question behind them; there is none.")

    def measure(number: int) -> PromptMeasurement:
        each = usable[number]
        return PromptMeasurement(
            subject, rope, header_ids, each.prompt, end_token, probe, continuation=each.continuation, planner=planner
        )

    made = Prompts(measure, len(usable))
    say("KV deviation of every layer")
    first = [made[number] for number in range(min(LOOK, len(usable)))]
    layers = examine_layers(first, subject.num_layers)
    stale, forced = (
        float(np.mean([getattr(m, name) / len(m.prompt.token_ids) for m in first]))
        for name in ("stale_tokens", "forced_tokens")
    )
    ranked = all(m.static is not None for m in first)
    candidates = list_candidates(layers, subject.num_layers, stale, forced, ranked=ranked)
    groups = ["|".join(sorted({span.chunk.id for span in each.prompt.spans})) for each in usable]
    search = Search(candidates, groups, standard, made.compare, say)
    least = search.run()
    chosen = least and search.step_above(least, margin)
    if everything:
        search.look_at_rest()
    return _conclude(search, chosen, least, standard, groups, made, layers)


def _conclude(
    search: Search,
    chosen: Trial | None,
    least: Trial | None,
    standard: Standard,
    groups: Sequence[str],
    made: Prompts,
    layers: list[LayerFinding],
) -> Calibration:
    measured = sorted((_measured(trial, standard) for trial in search.trials), key=lambda m: m.compute)
    found = None if chosen is None else _measured(chosen, standard)
    shown = search.enough_prompts
    verdict: Verdict = "do not blend" if found is None else "shown" if shown else "not shown"
    below = "" if least is None or least is chosen else str(least.candidate)
    why = _words(found, below, measured, standard, len(set(groups)), shown)
    tokens = max((sum(len(c.agrees) for _, c in trial.results) for trial in search.trials), default=0)
    summary: dict[str, Any] = {"verdict": verdict, "why": why, "prompts": len(groups), "standard": asdict(standard)}
    if found is not None:
        summary |= {"agreement": asdict(found.agreement), "compute": found.compute, "kl": found.kl}
    profile = replace(_profile(chosen, layers), calibrated=summary, text=_text_range(chosen, made))
    needed = standard.needed
    return Calibration(profile, verdict, why, standard, len(groups), tokens, needed, found, measured, layers)


def _profile(chosen: Trial | None, layers: Sequence[LayerFinding]) -> ModelProfile:
    # Chunks without a ranking are blended by hkvd, which needs a check layer whatever was chosen.
    deepest = max((each.layer for each in layers if each.offered), default=1)
    spare = BlendSchedule((deepest,), (1.0,))
    if chosen is None:
        return ModelProfile(check_layers=spare.check_layers, widths=spare.widths, reuse="prefix")
    candidate = chosen.candidate
    schedule = candidate.schedule if candidate.measures_deviation else spare
    return ModelProfile(candidate.ratio, candidate.policy, schedule.check_layers, schedule.widths)


def _text_range(chosen: Trial | None, made: Prompts) -> TextRange | None:
    """Return what the chosen ratio leaves out in these prompts; None where they say nothing about it."""
    if chosen is None or not chosen.candidate.ratio:
        return None
    shares = [left_out(m.static, chosen.candidate.ratio) for m in made.measured() if m.static is not None]
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
    goal = (
        f"{100 * standard.agreement:.6g}% agreement with full recompute at {100 * standard.confidence:.4g}% confidence"
    )
    few = f"{groups} prompts without common chunks cannot show {goal}: that takes {standard.needed}, if no token disagrees"
    if found is not None:
        holds = f"{found}, {found.compute:.1%} of full recompute's compute,"
        first, last = ("", f"; the least that does is {below}") if below else ("is the least that ", "")
        if shown:
            return f"{holds} {first}holds {goal} (lower bound {found.agreement.low:.2%}){last}"
        agrees = f"agrees {found.agreement.value:.1%} with a KL of {found.kl:.2g} nats"
        return f"{few}. On these {holds} {first}{agrees}{last}"
    best = max(measured, key=lambda each: each.agreement.value)
    tried = f"the best seen is {best} with {best.agreement.value:.1%}"
    if shown:
        return f"do not blend this: nothing up to a ratio of {RATIOS[-1]:.0%} holds {goal}; {tried}"
    return f"{few}. Even on these nothing up to a ratio of {RATIOS[-1]:.0%} agrees so much; {tried}: not blended until shown"


def calibrate_engine(
    engine: TransformersEngine,
    prompts: Sequence[CalibrationPrompt],
    output: Path | None = None,
    progress: Callable[[str], None] | None = None,
    standard: Standard | None = None,
    *,
    margin: int = 0,
    everything: bool = False,
) -> tuple[Calibration, Path]:
    """Calibrate the model of ``engine`` and write its profile; engines opened from now on use it.

    Args:
        engine: The model; its parity gate must have passed. Its store and registry are left as they are.
        prompts: RAG prompts; see :func:`cacheblend_rag.lab.calibration_prompts.collect_prompts`.
        output: Directory of the model, or of its KV writer, to write the profile into; None for the user's files.
        progress: Called with a line of text before each step.
        standard: See :func:`calibrate`.
        margin: See :func:`calibrate`.
        everything: See :func:`calibrate`.

    Returns:
        What was measured, and the file.

    Raises:
        ModelError: The model is not blended.
        InputError: No prompt is of use.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to calibrate: {engine.gate.reason}.")
    end = getattr(engine.tokenizer, "eos_token_id", None)

    def planner(prompt: TokenizedPrompt) -> BlendPlan:
        engine.precompute([span.chunk for span in prompt.spans])
        layers = engine.num_layers
        return engine.entries.plan(prompt, lambda hand, ids: hand.get(ids, layers), longest=engine.runner.longest)

    # In RAM, and with its budget: what it has no room for is computed anew where it is needed again.
    kept = engine.store, engine.ranking, engine.registry
    engine.store, engine.ranking, engine.registry = open_store(), "now", ChunkRegistry()
    try:
        found = calibrate(
            engine.subject(), engine.rope, engine.header_ids, prompts, standard, end, progress,
            planner=planner, margin=margin, everything=everything,
        )  # fmt: skip
    finally:
        engine.store, engine.ranking, engine.registry = kept
    return found, save_profile(found.profile, engine.fingerprint.digest, output, engine.writer)
