"""Compares the methods on passages of documents: time to first token, and agreement with full recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cacheblend_lab.intervals import Interval, mean_interval
from cacheblend_lab.measure import take_turns
from cacheblend_rag.blending.settings import BLEND, BlendSettings, ResolvedSettings
from cacheblend_rag.calibrate.calibration import CalibrationPrompt
from cacheblend_rag.calibrate.compared import PromptMeasurement, planner_of
from cacheblend_rag.demo.methods import METHODS
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine

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
            compared = measured.compare(profile.options(how))
            nearness[name].append((fmean(compared.kl), fmean(compared.agrees)))
        for name in take_turns(_METHODS, number):
            engine.reset_prefix_cache()  # otherwise a method would reuse what the method before it has cached
            done = engine.generate(each.prompt, SamplingParams(max_tokens=1), _METHODS[name])
            compute = (done.usage.computed_tokens + done.usage.selection_tokens) / len(each.prompt.token_ids)
            found[name].append((done.timings.ttft_s, compute))
    return {name: _summed(found[_FULL], runs, nearness.get(name, []), near.get(name)) for name, runs in found.items()}


def _summed(full: _Pairs, runs: _Pairs, nearness: _Pairs, how: ResolvedSettings | None) -> MethodOnDocuments:
    sooner = median(whole / time for (whole, _), (time, _) in zip(full, runs, strict=True))
    compute = fmean(share for _, share in runs)
    if how is None:
        return MethodOnDocuments(sooner, compute)
    each, (kl, agrees) = [""] * len(nearness), zip(*nearness, strict=True)
    between = mean_interval(kl, each), mean_interval(agrees, each)
    named = f"({how.policy} {how.ratio:.0%})" if how.ratio else ""
    return MethodOnDocuments(sooner, compute, fmean(kl), between[0], fmean(agrees), between[1], named)
