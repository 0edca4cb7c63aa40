"""Finds tiers whose KV does not delay the first token, by measured costs: ``cacheblend store calibrate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cacheblend_rag.blending.controller import Decision, Load, Located, decide
from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.calibrate.costs import token_bytes
from cacheblend_rag.calibrate.workbench import Workbench

# Price of storing KV, in an arbitrary unit: only the order of the tiers matters.
_PRICES: Final = {"ram": 10.0, "redis": 9.0, "disk": 1.0, "s3": 0.2, "gs": 0.2, "az": 0.2}
_QUESTION: Final = 32


@dataclass(frozen=True)
class TierPlan:
    """Holds the expected times of a typical prompt whose KV is in one tier.

    Attributes:
        tier: Name of the tier.
        load_s: Seconds that loading all of the prompt's KV takes.
        used: Number of chunks that the loading controller would load; computing the other chunks is faster.
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
    """Holds the tiers in which a typical prompt's KV may lie (paper section 5.1).

    Attributes:
        least: The lowest recompute ratio that the model needs.
        prefill_s: Seconds of an ordinary prefill.
        tiers: The expected times of each tier.
        cheapest: The cheapest tier from which loading hides behind recomputing; None if there is none.
    """

    least: float
    prefill_s: float
    tiers: tuple[TierPlan, ...]
    cheapest: str | None


def plan_storage(place: Workbench, costs: Costs, chunks: int, chunk_tokens: int) -> StoragePlan | None:
    """Return the expected times of a prompt of ``chunks`` chunks of ``chunk_tokens`` tokens, for each tier.

    No chunk counts as exact. Return None if the model is not blended.
    """
    load = typical_load(place, chunks, chunk_tokens)
    return None if load is None else plan_tiers(load, costs)


def typical_load(place: Workbench, chunks: int, chunk_tokens: int, ratio: float | None = None) -> Load | None:
    """Return the load of a prompt of ``chunks`` chunks of ``chunk_tokens`` tokens, none exact and none in a tier yet.

    The lowest ratio is the model profile's unless ``ratio`` is given. Return None if the model is not blended.
    """
    engine = place.engine
    if not engine.gate.passed:
        return None
    span = Located(chunk_tokens, token_bytes(place) * chunk_tokens, "")
    chosen = policy(engine.profile.policy)
    dense = engine.profile.check_layers[0] / engine.num_layers if chosen.needs_deviation else 0.0
    asked = 0 if chosen.needs_attention else None
    return Load([span] * chunks, _QUESTION, engine.profile.ratio if ratio is None else ratio, dense=dense, asked=asked)


def plan_tiers(load: Load, costs: Costs) -> StoragePlan:
    """Return the expected times of ``load`` in each tier of ``costs``; the tiers of the load's own spans are ignored."""
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
    """Holds the seconds of one blend: loading alone, computing alone, and the first token when loading and computing overlap."""

    load_s: float
    compute_s: float
    seconds: float


def blend_times(load: Load, costs: Costs, tier: str) -> BlendTimes:
    """Return the times of a blend of all of ``load`` at its lowest ratio with all KV in ``tier``."""
    moved = replace(load, spans=[replace(span, tier=tier) for span in load.spans])
    blend = Decision(moved, costs, [True] * len(moved.spans), load.least)
    return BlendTimes(blend.load_s, blend.compute_s, blend.seconds)


def cheapest_tier(load: Load, costs: Costs, prices: Mapping[str, float]) -> str | None:
    """Return the cheapest tier that adds no delay to a blend of ``load`` at its lowest ratio.

    Args:
        load: A typical prompt.
        costs: Costs of every tier that has a price.
        prices: Price of storing a byte in each tier, in any unit.

    Returns:
        The tier, or None if loading takes longer than recomputing in all tiers.
    """
    for tier in sorted(prices, key=lambda name: prices[name]):
        times = blend_times(load, costs, tier)
        if times.load_s <= times.compute_s:
            return tier
    return None
