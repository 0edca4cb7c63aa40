"""Measures requests per second at equal median TTFT: a stream of questions, with a corpus's chunks in random order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

from cacheblend_lab.bench.workbench import blend_by
from cacheblend_lab.measure import check_positive
from cacheblend_lab.policies import rank_for
from cacheblend_lab.reorder import ReorderedPrompts
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import FULL_RECOMPUTE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt

# Factor between tried rates. The result is interpolated log-linearly between the last rate that holds and the next one.
_STEP = 1.6
_MOST_RATES = 10
# Every rate lasts this many times the target TTFT, because a burst too short for a queue would favour high rates.
_HOLD = 15


@dataclass(frozen=True)
class ThroughputSettings:
    """Holds the load and the blend settings.

    Attributes:
        requests: Minimum number of requests at each rate, more at high rates; they arrive at random (Poisson).
        target_ttft_s: Median TTFT to hold; None takes twice the TTFT of a full prefill on an idle engine.
        skew: Exponent of popularity: chunk n of the corpus is drawn with weight n ** -skew; 0 draws all equally often,
            1 is Zipf's law.
        methods: Methods to measure, full and blend among them; None measures all methods of the engine.
    """

    corpus: int = 24
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    answer_tokens: int = 8
    requests: int = 40
    ratio: float | None = None
    policy: str | None = None
    target_ttft_s: float | None = None
    skew: float = 0.0
    seed: int = 0
    methods: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise InputError for settings that cannot be measured."""
        check_positive(self, "corpus", "chunks", "chunk_tokens", "question_tokens", "answer_tokens", "requests")
        if self.skew < 0:
            raise InputError(f"skew is {self.skew}; give at least 0.")
        if self.methods is not None and not {"full", "blend"} <= set(self.methods):
            raise InputError(f"methods are {', '.join(self.methods)}; full and blend must be among them.")
        if self.chunks > self.corpus:
            raise InputError(
                f"A prompt of {self.chunks} chunks needs a corpus of as many; give --corpus {self.chunks}."
            )


@dataclass(frozen=True)
class _Way:
    """Holds one way to serve the stream: blend settings, and whether a prompt's chunks are put into the prefix cache's order.

    ``ordinary`` prompts do not name their chunks, so that only the engine's own prefix cache serves them.
    """

    settings: BlendSettings
    reordered: bool = False
    ordinary: bool = False


@dataclass(frozen=True)
class _Served:
    """Holds one request's time to first token, in seconds, and the number of computed tokens of its prompt."""

    ttft_s: float
    computed_tokens: int


def bench_throughput(
    place: Workbench, settings: ThroughputSettings, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Raise the request rate of each method until its median TTFT exceeds the target; return plain data for JSON.

    ``methods`` has for each of full, prefix and blend the ``points`` tried (``rate`` in requests/s, ``requests``,
    median ``ttft_s``, ``p90_s``, mean ``computed_tokens`` of a prompt) and ``requests_per_s``, the rate at which the
    target is met. Prefix caching is ideal: every corpus chunk is stored. On an engine with a prefix cache of its own,
    two more methods put a prompt's chunks into an order that the prefix cache hits
    (:class:`~cacheblend_lab.reorder.ReorderedPrompts`): ``reorder``, ordinary requests, and ``reorder+blend``, whose
    prefixes were left by earlier blends.
    """
    say = progress or (lambda line: None)
    corpus = place.random_chunks(settings.corpus, settings.chunk_tokens, settings.seed)
    blend = blend_by(settings.ratio, settings.policy)
    methods = {"full": _Way(FULL_RECOMPUTE), "prefix": _Way(PREFIX_CACHING), "blend": _Way(blend)}
    if _has_prefix_cache(place):
        methods["reorder"] = _Way(BlendSettings(), reordered=True, ordinary=True)
        methods["reorder+blend"] = _Way(blend, reordered=True)
    if unknown := sorted(set(settings.methods or ()) - set(methods)):
        raise InputError(f"No such method here: {', '.join(unknown)}; this engine has {', '.join(methods)}.")
    methods = {name: how for name, how in methods.items() if name in (settings.methods or methods)}
    say("computing the chunks' KV")
    rank_for(place.engine, blend)
    place.engine.precompute(corpus)
    place.engine.precompute_first(corpus)  # each corpus chunk comes first in some prompt
    load = _Load(place, settings, corpus)
    say("warm-up")
    idle = {name: load.alone(how) for name, how in methods.items()}
    target = settings.target_ttft_s or 2 * idle["full"]
    found: dict[str, Any] = {}
    for name, how in methods.items():
        points: list[dict[str, float]] = []
        # At half the rate of back-to-back requests there is hardly a queue.
        rate = 0.5 / idle[name]
        while len(points) < _MOST_RATES and (not points or points[-1]["ttft_s"] <= target):
            say(f"{name}: {rate:.2f} requests/s")
            points.append(
                {"rate": rate, **load.at(rate, how, max(settings.requests, math.ceil(rate * _HOLD * target)))}
            )
            rate *= _STEP
        found[name] = {"idle_ttft_s": idle[name], "points": points, "requests_per_s": _rate_at(points, target)}
    rates = {name: method["requests_per_s"] for name, method in found.items()}
    return {
        **place.head(settings, target_ttft_s=target),
        "methods": found,
        **{f"blend_vs_{name}": rates["blend"] / rate for name, rate in rates.items() if name != "blend"},
    }


def _has_prefix_cache(place: Workbench) -> bool:
    engine = place.engine
    return bool(engine.prefixes.budget if isinstance(engine, TransformersEngine) else engine.prefix_cache_tokens)


def _prefix_cache_tokens(place: Workbench, stored: Chunk) -> int:
    """Return how many tokens the engine's prefix cache holds; transformers limits bytes, by which ``stored`` counts."""
    engine = place.engine
    if not isinstance(engine, TransformersEngine):
        return engine.prefix_cache_tokens
    kv = engine.entries.get(stored.token_ids, engine.num_layers)
    assert kv is not None
    return engine.prefixes.budget * kv.num_tokens // kv.nbytes


class _Load:
    def __init__(self, place: Workbench, settings: ThroughputSettings, corpus: list[Chunk]):
        self._place, self._settings, self._corpus = place, settings, corpus

    def alone(self, how: _Way) -> float:
        """Return the median TTFT, in seconds, of requests one after another."""
        return median([asyncio.run(self._run([0.0], how, seed))[0].ttft_s for seed in (1, 2, 3)])

    def at(self, rate: float, how: _Way, count: int) -> dict[str, float]:
        """Return median and 90th percentile of TTFT, in seconds, of ``count`` requests at ``rate`` a second."""
        rng = Random(self._settings.seed)
        at, arrivals = 0.0, []
        for _ in range(count):
            arrivals.append(at)
            at += rng.expovariate(rate)
        served = asyncio.run(self._run(arrivals, how, self._settings.seed))
        ttft = sorted(one.ttft_s for one in served)
        return {
            "requests": count,
            "ttft_s": median(ttft),
            "p90_s": ttft[math.ceil(0.9 * len(ttft)) - 1],
            "computed_tokens": sum(one.computed_tokens for one in served) / count,
        }

    def _prompts(self, count: int, how: _Way, seed: int) -> list[TokenizedPrompt]:
        rng = Random(seed)
        order = ReorderedPrompts(_prefix_cache_tokens(self._place, self._corpus[0]) if how.reordered else 0)
        prompts = []
        for _ in range(count):
            chunks = self._draw(rng)
            if how.reordered:
                chunks = order.order(chunks)
                order.serve(chunks)
            prompt = self._place.prompt(chunks, self._settings.question_tokens, rng.randrange(1 << 30))
            prompts.append(replace(prompt, spans=()) if how.ordinary else prompt)
        return prompts

    def _draw(self, rng: Random) -> list[Chunk]:
        """Return a prompt's chunks, drawn without replacement and shuffled; chunk n of the corpus has weight n ** -skew."""
        corpus, count, skew = self._corpus, self._settings.chunks, self._settings.skew
        if skew == 0:
            return rng.sample(corpus, count)
        # Efraimidis and Spirakis (2006): draw the chunks with the highest random() ** (1 / weight).
        keys = [rng.random() ** (rank**skew) for rank in range(1, len(corpus) + 1)]
        best = sorted(range(len(corpus)), key=keys.__getitem__, reverse=True)[:count]
        return [corpus[at] for at in rng.sample(best, count)]

    async def _run(self, arrivals: list[float], how: _Way, seed: int) -> list[_Served]:
        self._place.forget()
        prompts = self._prompts(len(arrivals), how, seed)
        begin = time.perf_counter()

        async def ask(index: int) -> _Served:
            await asyncio.sleep(arrivals[index] - (time.perf_counter() - begin))
            sampling = SamplingParams(self._settings.answer_tokens)
            ttft = 0.0
            async for event in self._place.engine.astream(prompts[index], sampling, how.settings):
                # TTFT counts from the scheduled arrival to the first event, so that it includes every queue.
                ttft = ttft or time.perf_counter() - begin - arrivals[index]
                answer = event.generation
            assert answer is not None
            # For prefix caching the exact prefix may come from the prefix cache or the store; using it alone is no
            # blend.
            served = answer.usage.reused_tokens if how.settings.reuse == "prefix" else answer.mode == "blend"
            if not served and how.settings.reuse != "off" and not how.ordinary:
                raise InputError(f"A request was not served as it should be: {answer.reason}.")
            return _Served(ttft, answer.usage.computed_tokens)

        return list(await asyncio.gather(*(ask(i) for i in range(len(arrivals)))))


def _rate_at(points: list[dict[str, float]], target: float) -> float:
    """Return the rate at which the median TTFT reaches ``target``, or the last rate tried if it never does."""
    held = [p for p in points if p["ttft_s"] <= target]
    over = [p for p in points if p["ttft_s"] > target]
    if not over:
        return held[-1]["rate"]
    if not held:
        return over[0]["rate"] * target / over[0]["ttft_s"]
    low, high = held[-1], over[0]
    share = (target - low["ttft_s"]) / (high["ttft_s"] - low["ttft_s"])
    return float(low["rate"] * (high["rate"] / low["rate"]) ** share)
