"""Measures time to first token against number and length of chunks, batch size, ratio, bandwidth and request rate.

Prompts are random tokens, so that any model can be measured, also a model with random weights. Every point runs all
methods, interleaved. A throttled store simulates storage devices (paper figure 17).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Literal

import numpy as np
import torch

from cacheblend_lab.bench.workbench import name_methods
from cacheblend_lab.measure import take_turns
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.costs import Costs, TierCost
from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, BlendSettings
from cacheblend_rag.calibrate.costs import measure_compute
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV


class _Device:
    """Simulates one queue of reads: concurrent reads run one after the other."""

    def __init__(self, bytes_per_s: float):
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            ready = self._free_at
        time.sleep(max(0.0, ready - time.perf_counter()))


class _SlowKV(StoredKV):
    tier = "device"

    def __init__(self, kv: StoredKV, device: _Device):
        self._kv, self._device = kv, device
        self.num_layers, self.num_tokens, self.start = kv.num_layers, kv.num_tokens, kv.start
        self.nbytes, self.stored_nbytes = kv.nbytes, kv.stored_nbytes

    def layer(self, index: int) -> LayerKV:
        found = self._kv.layer(index)
        self._device.read(found.k.nbytes + found.v.nbytes)
        return found

    def static_deviation(self) -> torch.Tensor | None:
        return self._kv.static_deviation()


class ThrottledStore(MemoryStore):
    """Stores KV in RAM that is read at ``bytes_per_s``, shared by all reads; latency is not simulated. Writes have full speed.

    Attributes:
        bytes_per_s: The bandwidth; may be changed between requests.
    """

    def __init__(self, bytes_per_s: float):
        """Open an empty store without a budget.

        Raises:
            InputError: The bandwidth is not above 0.
        """
        super().__init__()
        self.bytes_per_s = bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes read per second."""
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float) -> None:
        if not rate > 0:
            raise InputError(f"A bandwidth of {rate} bytes per second reads nothing; give more than 0.")
        self._bytes_per_s = rate
        self._device = _Device(rate)

    def get(self, key: KVKey) -> ChunkKV | None:
        """Return the entry of ``key`` as :meth:`KVStore.get` does; its layers are read at the device's rate."""
        found = super().get(key)
        return None if found is None else _SlowKV(found, self._device)  # type: ignore[return-value]


Axis = Literal["chunks", "chunk_tokens", "batch"]
Point = dict[str, Any]
Progress = Callable[[str], None]

CHUNK_TOKENS: Final = 512
QUESTION_TOKENS: Final = 32
READY: Final = "ready"
"""Name of the method that blends KV without loading time."""
_SIMULATED_REQUESTS: Final = 4000
_RATES: Final = 12
_METHODS: Final = name_methods(BLEND)


def sweep_sizes(
    place: Workbench, axis: Axis, values: Sequence[int], repeat: int = 3, say: Progress = lambda line: None
) -> list[Point]:
    """Vary the number of chunks of 512 tokens, the length of six chunks, or the number of simultaneous requests for six.

    This engine computes the tokens of one request at a time. The TTFT of the last request in a batch, which is
    returned, is therefore the sum of the prefills: a loop over single requests would show the same.
    """
    points = []
    for n in values:
        chunks, tokens, batch = {
            "chunks": (n, CHUNK_TOKENS, 1),
            "chunk_tokens": (6, n, 1),
            "batch": (6, CHUNK_TOKENS, n),
        }[axis]
        points += _point(place, {axis: n}, chunks, tokens, _METHODS, repeat, say, batch)
    return points


def sweep_ratio(
    place: Workbench,
    ratios: Sequence[float],
    policy: str | None = None,
    repeat: int = 3,
    say: Progress = lambda line: None,
) -> list[Point]:
    """Vary the recompute ratio from full KV reuse to full recompute."""
    compared = {"full": FULL_RECOMPUTE, "reuse": FULL_REUSE}
    compared |= {f"{ratio:g}": BlendSettings(ratio, policy) for ratio in ratios}
    points = _point(place, {}, 6, CHUNK_TOKENS, compared, repeat, say)
    ends = {"full": 1.0, "reuse": 0.0}
    return [
        {
            **p,
            "ratio": ends[p["method"]] if p["method"] in ends else float(p["method"]),
            "method": p["method"] if p["method"] in ends else "blend",
        }
        for p in points
    ]


def sweep_devices(
    place: Workbench,
    bandwidths: Sequence[float] = (5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 4.8e9),
    repeat: int = 3,
    say: Progress = lambda line: None,
    blend: BlendSettings = BLEND,
) -> list[Point]:
    """Vary the bandwidth, in bytes per second, of reading stored KV; prefix caching loads for free.

    Two methods are added. ``controller``: the loading controller, which knows the device's bandwidth and the model's
    prefill times here, chooses what to load and how much to recompute. ``ready``: the blend from a device without
    reading time, which shows the time of recomputing alone. The blend's point has ``bound_s``, the longer time of
    loading and recomputing: no overlap of the two can be faster (paper section 5.1).

    Raises:
        InputError: The engine's store is not a :class:`~cacheblend_lab.bench.sweeps.ThrottledStore`.
    """
    engine, store = place.engine, place.engine.store
    if not (isinstance(store, ThrottledStore) and isinstance(engine, TransformersEngine)):
        raise InputError("Storage devices are simulated by a throttled store; open a transformers engine with one.")
    usual = engine.costs, engine.profile
    compute = measure_compute(place.engine)
    compared = name_methods(blend) | {
        "controller": BlendSettings("auto", blend.policy, blend.check_layers),
        READY: blend,
    }
    points = []
    lowest = blend.ratio if isinstance(blend.ratio, float) else engine.profile.ratio
    # Random tokens are unlike any text. A profile with a text range would therefore raise the controller's ratio.
    engine.profile = replace(engine.profile, text=None, ratio=lowest)
    try:
        for rate in bandwidths:

            def set_rate(method: str, rate: float = rate) -> None:
                store.bytes_per_s = math.inf if method == READY else rate

            engine.costs = Costs(engine.num_layers, compute, {"device": TierCost(0.0, rate)})
            found = _point(place, {"bytes_per_s": rate}, 6, CHUNK_TOKENS, compared, repeat, say, before=set_rate)
            by_name = {point["method"]: point for point in found}
            blended = by_name["blend"]
            blended["bound_s"] = max(blended["loaded_bytes"] / rate, by_name[READY]["ttft_s"])
            points += found
    finally:
        engine.costs, engine.profile = usual
    return points


def simulate_queue(
    service_s: Mapping[str, Sequence[tuple[float, float]]], rates: Sequence[float], seed: int = 0
) -> list[Point]:
    """Return the TTFT at given request rates, simulated from measured requests.

    Requests arrive at random (Poisson) and are served one after another, first come first served, as in the embedded
    engine; each request takes one of the measured times. A rate above a method's capacity has no steady state: its
    ``ttft_s`` is None.

    Args:
        service_s: For each method, measured pairs of time to first token and time to last token, in seconds.
        rates: Requests per second.
        seed: Seed of arrivals and draws.
    """
    points = []
    for name, measured in service_s.items():
        times = np.asarray(measured, np.float64)
        capacity = 1 / times[:, 1].mean()
        for rate in rates:
            point: Point = {"rate": rate, "method": name, "capacity": capacity, "ttft_s": None}
            if rate < 0.98 * capacity:
                generator = np.random.default_rng(seed)
                arrivals = generator.exponential(1 / rate, _SIMULATED_REQUESTS).cumsum()
                drawn = times[generator.integers(len(times), size=_SIMULATED_REQUESTS)]
                free, waits = 0.0, np.empty(_SIMULATED_REQUESTS)
                for i, (arrival, (first, total)) in enumerate(zip(arrivals, drawn, strict=True)):
                    begin = max(arrival, free)
                    waits[i] = begin - arrival + first
                    free = begin + total
                point["ttft_s"] = float(waits[_SIMULATED_REQUESTS // 10 :].mean())
            points.append(point)
    return points


def choose_rates(service_s: Mapping[str, Sequence[tuple[float, float]]]) -> list[float]:
    """Return request rates from a quarter of the slowest method's capacity to nearly the fastest method's capacity."""
    best = max(1 / float(np.mean([total for _, total in measured])) for measured in service_s.values())
    slowest = min(1 / float(np.mean([total for _, total in measured])) for measured in service_s.values())
    return [float(rate) for rate in np.geomspace(slowest / 4, best * 0.97, _RATES)]


def _prompt(place: Workbench, chunks: int, chunk_tokens: int) -> TokenizedPrompt:
    made = place.random_chunks(chunks, chunk_tokens, chunks * 10_000 + chunk_tokens)
    place.engine.precompute(made)
    return place.prompt(made, QUESTION_TOKENS, chunks)


def _point(
    place: Workbench,
    at: Point,
    chunks: int,
    chunk_tokens: int,
    compared: dict[str, BlendSettings],
    repeat: int,
    say: Progress,
    batch: int = 1,
    before: Callable[[str], None] = lambda method: None,
) -> list[Point]:
    say(", ".join(f"{key} {value:g}" for key, value in at.items()) or "all ratios")
    prompt = _prompt(place, chunks, chunk_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    done: dict[str, Generation] = {}
    for number in range(repeat + 1):
        for name in take_turns(compared, number):
            total = 0.0
            before(name)
            for _ in range(batch):
                place.forget()
                *_, last = place.engine.stream(prompt, SamplingParams(1), compared[name])
                assert last.generation is not None
                done[name] = last.generation
                total += done[name].timings.ttft_s - (done[name].load_s if name == "prefix" else 0.0)
            if number:  # the first round warms up
                seconds[name].append(total)
    return [
        {
            **at,
            "method": name,
            "ttft_s": median(times),
            "fastest_s": min(times),
            "slowest_s": max(times),
            "computed_tokens": done[name].usage.computed_tokens,
            "loaded_bytes": sum(load.nbytes for load in done[name].loads),
            "prompt_tokens": len(prompt.token_ids),
        }
        for name, times in seconds.items()
    ]
