"""What computing costs on this machine: prefills of a few lengths and a blend, timed, and the cost that explains them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from cacheblend_rag.bench.measure import median
from cacheblend_rag.bench.setup import Workbench
from cacheblend_rag.blending.costs import ComputeCost
from cacheblend_rag.blending.settings import FULL_REUSE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store import MemoryStore

_LONG = 1024
_REPEAT = 3
_CHUNKS, _QUESTION = 4, 8


def measure_compute(engine: TransformersEngine) -> ComputeCost:
    """Return what computing costs, placing stored KV included."""
    return with_placing(fit_compute(measure_prefills(engine)), engine)


def measure_prefills(engine: TransformersEngine) -> dict[int, float]:
    """Return the seconds of prefills by their number of tokens: three lengths up to 1,024, or what the model takes."""
    long = min(_LONG, engine.context_window - 1)
    lengths = sorted({max(1, long // 32), max(1, long // 4), long})
    return {count: _first_token_s(engine, TokenizedPrompt((0,) * count, ())) for count in lengths}


def fit_compute(measured_s: dict[int, float]) -> ComputeCost:
    """Return the cost, of parts that are not negative, whose prefills of some lengths come nearest to what was measured."""
    tokens = np.array(sorted(measured_s), np.float64)
    seconds = np.array([measured_s[int(count)] for count in tokens])
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    # Relative errors, so that the short lengths count as much as the long ones.
    parts, _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    return ComputeCost(*parts.tolist())


def with_placing(compute: ComputeCost, engine: TransformersEngine) -> ComputeCost:
    """Return the cost with what placing stored KV takes: what a full KV reuse from RAM takes longer than its few tokens.

    As it was where the model is not blended.
    """
    tokens = (min(_LONG, engine.context_window - 1) - len(engine.header_ids) - _QUESTION) // _CHUNKS
    if not engine.gate.passed or tokens < 1:
        return compute
    place, usual = Workbench.of(engine), engine.store
    engine.store = MemoryStore()
    try:
        chunks = place.random_chunks(_CHUNKS, tokens, seed=0)
        engine.precompute(chunks)
        prompt = place.prompt(chunks, _QUESTION, seed=0)
        took = _first_token_s(engine, prompt, FULL_REUSE)
    finally:
        engine.store = usual
    length = len(prompt.token_ids)
    beside = took - compute.seconds(_QUESTION, length)
    return replace(compute, per_placed_s=max(0.0, beside / (length - _QUESTION)))


def _first_token_s(engine: TransformersEngine, prompt: TokenizedPrompt, settings: BlendSettings | None = None) -> float:
    times = []
    for _ in range(_REPEAT + 1):  # the first one warms up
        begin = time.perf_counter()
        engine.generate(prompt, SamplingParams(max_tokens=1), settings)
        times.append(time.perf_counter() - begin)
    return median(times[1:])
