"""What loading and computing cost here, measured for the loading controller: ``cacheblend store calibrate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from cacheblend_rag.bench.bandwidth import (
    measure_device_copy,
    measure_disk_latency,
    measure_disk_read,
    measure_ram_copy,
)
from cacheblend_rag.bench.measure import median
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import TokenizedPrompt

_LONG = 1024
_REPEAT = 3


def measure_costs(engine: TransformersEngine, store: Path, progress: Callable[[str], None] | None = None) -> Costs:
    """Measure a model on its device, and the RAM and disk tiers of the store at ``store``; takes seconds.

    The disk is read with an empty page cache: what the controller reckons with is what holds on a bad day, and runs correct it.
    """
    say = progress or (lambda line: None)
    say("computing")
    compute = fit_compute(measure_prefills(engine))
    say("RAM")
    ram = measure_ram_copy() if engine.runner.device.type == "cpu" else measure_device_copy(engine.runner.device)
    tiers = {"ram": TierCost(0.0, ram)}
    say("disk")
    if (rate := measure_disk_read(store, cold=True)) is not None:
        tiers["disk"] = TierCost(measure_disk_latency(store), rate)
    return Costs(engine.num_layers, compute, tiers)


def measure_prefills(engine: TransformersEngine) -> dict[int, float]:
    """Return the seconds of prefills by their number of tokens: three lengths up to 1,024, or what the model takes."""
    long = min(_LONG, engine.context_window - 1)
    return {count: _prefill_s(engine, count) for count in sorted({max(1, long // 32), max(1, long // 4), long})}


def fit_compute(measured_s: dict[int, float]) -> ComputeCost:
    """Return the cost, of parts that are not negative, whose prefills of some lengths come nearest to what was measured."""
    tokens = np.array(sorted(measured_s), np.float64)
    seconds = np.array([measured_s[int(count)] for count in tokens])
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    # Relative errors, so that the short lengths count as much as the long ones.
    parts, _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    return ComputeCost(*parts.tolist())


def _prefill_s(engine: TransformersEngine, count: int) -> float:
    times = []
    for _ in range(_REPEAT + 1):
        begin = time.perf_counter()
        engine.generate(TokenizedPrompt((0,) * count, ()), SamplingParams(max_tokens=1))
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def token_bytes(engine: TransformersEngine) -> int:
    """Return the size of one token's KV in all layers."""
    return engine.subject().full_prefill([0] * 8)[1].nbytes // 8
