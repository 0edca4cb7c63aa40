"""Says where KV may lie without delaying the first token, by measured costs: ``cacheblend store calibrate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cacheblend_rag.blending.controller import Arm, Load, Located, decide
from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.calibrate.costs import token_bytes
from cacheblend_rag.calibrate.workbench import Workbench

# What keeping KV costs, in some unit: only the order of the tiers matters.
_PRICES: Final = {"ram": 10.0, "redis": 9.0, "disk": 1.0, "s3": 0.2, "gs": 0.2, "az": 0.2}
_QUESTION: Final = 32


@dataclass(frozen=True)
class TierPlan:
    """Says what to expect of a typical prompt whose KV lies in one tier.

    Attributes:
        tier: The tier's name.
        load_s: Seconds that loading all of it takes.
        used: Chunks that the loading controller would load; the others are sooner computed.
        ratio: The highest recompute ratio that costs no time.
        seconds: Time to first token.
    """

    tier: str
    load_s: float
    used: int
    ratio: float
    seconds: float


@dataclass(frozen=True)
class StoragePlan:
    """Says where a typical prompt's KV may lie (paper section 5.1).

    Attributes:
        least: The lowest recompute ratio that the model needs.
        prefill_s: Seconds of an ordinary prefill.
        tiers: What to expect of each tier.
        cheapest: The cheapest tier from which loading hides behind recomputing; None if there is none.
    """

    least: float
    prefill_s: float
    tiers: tuple[TierPlan, ...]
    cheapest: str | None


def plan_storage(place: Workbench, costs: Costs, chunks: int, chunk_tokens: int) -> StoragePlan | None:
    """Return what to expect of a prompt of ``chunks`` chunks of ``chunk_tokens``, by the tier that its KV is in.

    None of the chunks counts as exact. None if the model is not blended.
    """
    load = typical_load(place, chunks, chunk_tokens)
    return None if load is None else plan_tiers(load, costs)


def typical_load(place: Workbench, chunks: int, chunk_tokens: int, ratio: float | None = None) -> Load | None:
    """Return a prompt of ``chunks`` chunks of ``chunk_tokens``, none of them exact and in no tier yet.

    Its lowest ratio is the model profile's unless one is given. None if the model is not blended.
    """
    engine = place.engine
    if not engine.gate.passed:
        return None
    span = Located(chunk_tokens, token_bytes(place) * chunk_tokens, "")
    dense = engine.profile.dense_share(engine.profile.policy, engine.num_layers)
    asked = 0 if policy(engine.profile.policy).needs_attention else None
    return Load([span] * chunks, _QUESTION, engine.profile.ratio if ratio is None else ratio, dense=dense, asked=asked)


def plan_tiers(load: Load, costs: Costs) -> StoragePlan:
    """Return what to expect of ``load``, whatever tiers it names, in each tier of ``costs``."""
    found = []
    for tier, cost in costs.tiers.items():
        spans = [replace(span, tier=tier) for span in load.spans]
        decision = decide(replace(load, spans=spans), costs)
        load_s = cost.seconds(sum(span.nbytes for span in spans), len(spans) * costs.layers)
        found.append(TierPlan(tier, load_s, sum(decision.used), decision.ratio, decision.seconds))
    prices = {tier: price for tier, price in _PRICES.items() if tier in costs.tiers}
    prefill_s = costs.compute.seconds(load.tokens, load.tokens)
    return StoragePlan(load.least, prefill_s, tuple(found), cheapest_tier(load, costs, prices))


@dataclass(frozen=True)
class BlendTimes:
    """Holds the seconds of one blend: of loading alone, of computing alone, and to the first token, one overlapping the other."""

    load_s: float
    compute_s: float
    seconds: float


def blend_times(load: Load, costs: Costs, tier: str) -> BlendTimes:
    """Return what a blend of all of ``load`` at its lowest ratio takes with its KV in ``tier``, whatever tiers it names."""
    moved = replace(load, spans=[replace(span, tier=tier) for span in load.spans])
    arm = Arm(moved, costs, (True,) * len(moved.spans))
    return BlendTimes(arm.load_s, arm.compute_s(load.least), arm.seconds(load.least))


def cheapest_tier(load: Load, costs: Costs, prices: Mapping[str, float]) -> str | None:
    """Return the cheapest tier that adds no delay to a blend of ``load`` at its lowest ratio, whatever tiers it names.

    Args:
        load: A typical prompt.
        costs: Of every tier that has a price.
        prices: For each tier what keeping a byte costs, in any unit.

    Returns:
        The tier, or None if loading takes longer than recomputing from all of them.
    """
    for tier in sorted(prices, key=lambda name: prices[name]):
        times = blend_times(load, costs, tier)
        if times.load_s <= times.compute_s:
            return tier
    return None
