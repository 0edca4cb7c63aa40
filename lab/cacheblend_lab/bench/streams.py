"""Measures how blends slow down concurrent streams: inter-token times against ordinary prefill of the same prompts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from cacheblend_lab.bench.workbench import blend_by
from cacheblend_lab.measure import check_positive, count_rounds
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class StreamsSettings:
    """Holds the sizes of the streams, and of the prompts that arrive meanwhile."""

    streams: int = 2
    prompts: int = 4
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float | None = None
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a size below 1."""
        check_positive(self, "streams", "prompts", "chunks", "chunk_tokens", "question_tokens", "repeat")


def bench_streams(
    place: Workbench, settings: StreamsSettings, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure the methods, which take turns after a warm-up round, and return plain data for JSON.

    ``methods`` has for full and blend the inter-token times of all streams while the prompts were answered: ``p50_s``,
    ``p99_s`` and ``max_s`` (medians over the rounds), and ``tokens``, the number of inter-token times.
    """
    say = progress or (lambda line: None)
    chunks = place.random_chunks(settings.prompts * settings.chunks, settings.chunk_tokens, settings.seed)
    say("computing the chunks' KV")
    place.engine.precompute(chunks)
    size = settings.chunks
    prompts = [
        place.prompt(chunks[i * size : (i + 1) * size], settings.question_tokens, i) for i in range(settings.prompts)
    ]
    methods = {"full": FULL_RECOMPUTE, "blend": blend_by(settings.ratio)}
    rounds: dict[str, list[list[float]]] = {name: [] for name in methods}
    for index, round_name in count_rounds(settings.repeat):
        for name, how in methods.items():
            say(f"{name}, {round_name}")
            place.forget()
            gaps = asyncio.run(_round(place, settings.streams, prompts, how))
            if index:
                rounds[name].append(gaps)
    found = {
        name: {
            "p50_s": median([_percentile(gaps, 0.5) for gaps in each]),
            "p99_s": median([_percentile(gaps, 0.99) for gaps in each]),
            "max_s": median([max(gaps) for gaps in each]),
            "tokens": sum(map(len, each)),
        }
        for name, each in rounds.items()
    }
    return {
        **place.head(settings),
        "methods": found,
        "p99_blend_vs_full": found["blend"]["p99_s"] / found["full"]["p99_s"],
    }


async def _round(place: Workbench, streams: int, prompts: list[TokenizedPrompt], how: BlendSettings) -> list[float]:
    """Stream answers to short prompts while ``prompts`` are answered; return the streams' inter-token times in seconds."""
    over = asyncio.Event()
    ready = asyncio.Event()
    running = 0

    async def stream(seed: int) -> list[float]:
        nonlocal running
        gaps: list[float] = []
        tokens = 0
        while not over.is_set():  # a new answer follows each completed answer
            short, last = place.prompt([], 16, 1000 + seed), 0.0
            seed += streams
            room = place.engine.context_window - len(short.token_ids)
            events = place.engine.astream(short, SamplingParams(min(_LONGEST, room)), FULL_RECOMPUTE)
            async for _ in events:
                tokens, now = tokens + 1, time.perf_counter()
                if tokens == _SETTLED:
                    running += 1
                    if running == streams:
                        ready.set()
                if last and tokens > _SETTLED + 1:
                    gaps.append(now - last)
                last = now
                if over.is_set() and gaps:  # a round shorter than a token still measures one inter-token time
                    break
            await events.aclose()  # type: ignore[attr-defined]
        return gaps

    tasks = [asyncio.create_task(stream(i)) for i in range(streams)]
    await ready.wait()
    for prompt in prompts:
        async for _ in place.engine.astream(prompt, SamplingParams(1), how):
            pass
    over.set()
    return [gap for gaps in await asyncio.gather(*tasks) for gap in gaps]


# Tokens after which a stream counts as running, and a token limit that is longer than any round.
_SETTLED, _LONGEST = 4, 4000


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]
