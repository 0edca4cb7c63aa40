"""Measures the cost of computing on this machine: times prefills and a blend, and fits a cost model to the times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from cacheblend_rag.blending.costs import ComputeCost
from cacheblend_rag.blending.settings import FULL_REUSE, BlendSettings
from cacheblend_rag.calibrate.workbench import Workbench
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store import MemoryStore

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

_LONG = 1024
_REPEAT = 3
_CHUNKS, _QUESTION = 4, 8


def measure_compute(place: Workbench) -> ComputeCost:
    """Return the cost of computing, with the cost of placing stored KV."""
    return with_placing(fit_compute(measure_prefills(place)), place)


def measure_prefills(place: Workbench) -> dict[int, float]:
    """Return the seconds of prefills by number of tokens: three lengths up to 1,024, or up to the context window."""
    long = min(_LONG, place.engine.context_window - 1)
    lengths = sorted({max(1, long // 32), max(1, long // 4), long})
    return {count: _first_token_s(place, TokenizedPrompt(place.random_ids(count, seed=0), ())) for count in lengths}


def fit_compute(measured_s: dict[int, float]) -> ComputeCost:
    """Return the cost, with no negative part, that fits the measured seconds of prefills best."""
    from scipy.optimize import nnls

    tokens = np.array(sorted(measured_s), np.float64)
    seconds = np.array([measured_s[int(count)] for count in tokens])
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    # Relative errors give short lengths the same weight as long lengths.
    parts, _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    return ComputeCost(*parts.tolist())


def with_placing(compute: ComputeCost, place: Workbench) -> ComputeCost:
    """Return the cost with the seconds of placing stored KV, measured by a full KV reuse from RAM.

    The placing cost is the time of the full KV reuse beyond the time of its few computed tokens. The cost is unchanged
    if the model is not blended or its context window is too short. On vLLM the chunks of random tokens stay in the
    engine's store.
    """
    engine = place.engine
    tokens = (min(_LONG, engine.context_window - 1) - len(engine.header_ids) - _QUESTION) // _CHUNKS
    if not engine.gate.passed or tokens < 1:
        return compute
    chunks = place.random_chunks(_CHUNKS, tokens, seed=0)
    prompt = place.prompt(chunks, _QUESTION, seed=0)
    with _memory_alone(engine):
        engine.precompute(chunks)
        took = _first_token_s(place, prompt, FULL_REUSE)
    length = len(prompt.token_ids)
    beside = took - compute.seconds(_QUESTION, length)
    return replace(compute, per_placed_s=max(0.0, beside / (length - _QUESTION)))


@contextmanager
def _memory_alone(engine: TransformersEngine | VLLMEngine) -> Iterator[None]:
    """Give the engine an empty store in RAM for the measurement.

    vLLM keeps its store, because its workers have opened the store; they read from RAM from the second use on.
    """
    if not isinstance(engine, TransformersEngine):
        yield
        return
    usual, engine.store = engine.store, MemoryStore()
    try:
        yield
    finally:
        engine.store = usual


def _first_token_s(place: Workbench, prompt: TokenizedPrompt, settings: BlendSettings | None = None) -> float:
    times = []
    for _ in range(_REPEAT + 1):  # the first one warms up
        place.forget()
        begin = time.perf_counter()
        place.engine.generate(prompt, SamplingParams(max_tokens=1), settings)
        times.append(time.perf_counter() - begin)
    return median(times[1:])
