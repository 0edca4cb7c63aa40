"""Compares the loading controller's choices with every possible choice, over a grid of devices, prompts and models.

The prompts run through a simulation of loading and computing, event by event, which shares no formula with the
controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from cacheblend_lab.measure import check_positive
from cacheblend_rag.blending.controller import Load, Located, decide
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.errors import InputError

CHUNK_TOKENS: Final = 512
QUESTION_TOKENS: Final = 32
_RATIOS: Final = 24
_RAM: Final = TierCost(2e-5, 5e10, 8)


@dataclass(frozen=True)
class ModelShape:
    """Holds the sizes of a model that determine loading and computing."""

    layers: int
    kv_bytes: int
    flops: float
    width: int

    def costs(self, flops_per_s: float, tiers: dict[str, TierCost]) -> Costs:
        """Return the model's costs on a device that computes ``flops_per_s``; a launch of a layer takes 100 us."""
        pair = 2 * self.layers * self.width  # a causal pass computes half of the pairs
        return Costs(self.layers, ComputeCost(1e-4 * self.layers, self.flops / flops_per_s, pair / flops_per_s), tiers)


SHAPES: Final = {
    "llama-3.1-8b": ModelShape(32, 128 << 10, 15e9, 4096),
    "qwen2.5-7b": ModelShape(28, 56 << 10, 14e9, 3584),
    "llama-3.3-70b": ModelShape(80, 320 << 10, 139e9, 8192),
}


@dataclass(frozen=True)
class ControllerSettings:
    """Holds the settings of the grid.

    Attributes:
        bandwidths: Number of bandwidths, from 0.1 to 50 GB/s.
        chunks: Numbers of chunks in a prompt, of 512 tokens each.
        dense: Number of layers of a dense pass; 0 for a policy without a dense pass.
    """

    ratio: float = 0.15
    bandwidths: int = 12
    chunks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    flops: float = 4e14
    dense: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for settings without a grid."""
        check_positive(self, "bandwidths")
        if not 0 <= self.ratio <= 1 or self.flops <= 0 or self.dense < 0 or not all(n >= 1 for n in self.chunks):
            raise InputError("The ratio is from 0 to 1; chunks, FLOP/s and layers of a dense pass are not negative.")


def bench_controller(settings: ControllerSettings) -> dict[str, Any]:
    """Compare the controller's choice with the best choice, at each point of the grid; return plain data for JSON.

    ``points`` has for each shape, bandwidth, number of chunks and placement (all chunks on the device; every second
    chunk in RAM) the controller's ``ratio``, the number of chunks ``used``, the controller's simulated ``ttft_s``, the
    ``best_s`` of every choice with at least the lowest ratio, and ``regret``, the quotient ``ttft_s`` / ``best_s``.
    ``worst_regret`` is the largest regret.
    """
    points = [_point(settings, *place) for place in _grid(settings)]
    worst = max(points, key=lambda point: point["regret"])
    return {"settings": asdict(settings), "points": points, "worst_regret": worst["regret"], "worst": worst}


def _grid(settings: ControllerSettings) -> Iterator[tuple[str, float, int, str]]:
    rates = np.geomspace(1e8, 5e10, settings.bandwidths).tolist()
    return product(SHAPES, rates, settings.chunks, ("device", "half in RAM"))


def _point(settings: ControllerSettings, name: str, rate: float, chunks: int, placed: str) -> dict[str, Any]:
    shape = SHAPES[name]
    costs = shape.costs(settings.flops, {"device": TierCost(1e-4, rate, 8), "ram": _RAM})
    tiers = ["ram" if placed != "device" and i % 2 else "device" for i in range(chunks)]
    spans = [Located(CHUNK_TOKENS, CHUNK_TOKENS * shape.kv_bytes, tier, i == 0) for i, tier in enumerate(tiers)]
    load = Load(spans, QUESTION_TOKENS, settings.ratio, dense=settings.dense / shape.layers)
    chosen = decide(load, costs)
    took = simulate_one(load, costs, chosen.used, chosen.ratio)
    best = float(simulate(load, costs, *_every_choice(load)).min())
    return {
        "model": name,
        "bytes_per_s": rate,
        "chunks": chunks,
        "placed": placed,
        "used": sum(chosen.used),
        "ratio": chosen.ratio,
        "ttft_s": took,
        "best_s": best,
        "prefill_s": simulate_one(load, costs, (False,) * chunks, 0.0),
        "regret": took / best,
    }


def _every_choice(load: Load) -> tuple[np.ndarray, np.ndarray]:
    """Return choices of spans, ``[choices, spans]``, and ratios, ``[ratios, 1]``; of equal spans only the number matters."""
    kinds: dict[Located, list[int]] = {}
    for index, span in enumerate(load.spans):
        kinds.setdefault(span, []).append(index)
    counts = np.array(list(product(*(range(len(members) + 1) for members in kinds.values()))))
    used = np.zeros((len(counts), len(load.spans)), bool)
    for column, members in enumerate(kinds.values()):
        used[:, members] = np.arange(len(members)) < counts[:, column, None]
    return used, np.linspace(load.least, 1.0, _RATIOS)[:, None]


def simulate(load: Load, costs: Costs, used: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return the seconds to the first token, ``[ratios, choices]``; each layer is computed once it is loaded.

    Args:
        load: The prompt.
        costs: Costs of model and tiers.
        used: Choices of spans, ``[choices, spans]``.
        ratio: Ratios of each choice, ``[ratios, 1]``.
    """
    tokens = np.array([span.tokens for span in load.spans])
    exact = np.array([span.exact for span in load.spans])
    stale, in_place = used @ (tokens * ~exact), load.tokens - used @ tokens
    arrived = _arrivals(load, costs, used)
    placing = used @ tokens * costs.compute.per_placed_s / costs.layers

    def compute(count: np.ndarray) -> np.ndarray:
        part, context = costs.compute, load.tokens
        return (part.fixed_s + count * (part.per_token_s + part.per_pair_s * context)) / costs.layers

    now = np.zeros((len(ratio), len(used)))
    if load.dense:
        checked = round(load.dense * costs.layers)
        dense = np.maximum(arrived[checked], checked * compute(in_place + stale))
        now = np.where((ratio > 0) & (ratio < 1) & (stale > 0), dense, now)
    each = placing + compute(in_place + ratio * stale)
    for there in arrived:
        now = np.maximum(now, there) + each
    return now


def _arrivals(load: Load, costs: Costs, used: np.ndarray) -> np.ndarray:
    """Return the time at which each layer is loaded, ``[layers, choices]``; the reads of all tiers run one after the other."""
    used = used.astype(np.int64)  # a product of booleans would be a logical "or", not a sum
    done = np.arange(1, costs.layers + 1)[:, None]
    reading = np.zeros((costs.layers, len(used)))
    for tier in {span.tier for span in load.spans}:
        there = np.array([span.tier == tier for span in load.spans])
        reads = used @ there
        nbytes = used @ (there * [span.nbytes for span in load.spans]) / costs.layers
        cost = costs.tiers[tier]
        reading += np.ceil(done * reads / cost.at_once) * cost.latency_s + done * nbytes / cost.bytes_per_s
    return reading


def simulate_one(load: Load, costs: Costs, used: Sequence[bool], ratio: float) -> float:
    """Return the result of :func:`simulate` for a single choice."""
    return float(simulate(load, costs, np.array([used]), np.array([[ratio]]))[0, 0])
