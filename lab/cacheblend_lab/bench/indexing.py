"""Measures the token rate of indexing, with and without ranking tokens, against a plain batched prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from cacheblend_lab.measure import check_positive, count_rounds, take_turns
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.calibrate.rounding import own_attention
from cacheblend_rag.engines.entries import Ranking
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.precompute import rows_per_batch
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class IndexSettings:
    """Holds the size of what is indexed in every round.

    Attributes:
        chunks: Number of chunks in a round.
        chunk_tokens: Tokens in each chunk.
        repeat: Timed rounds of each method.
        seed: Seed of the random tokens.
    """

    chunks: int = 16
    chunk_tokens: int = 512
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a size below 1."""
        check_positive(self, "chunks", "chunk_tokens", "repeat")


def bench_index(
    place: Workbench, settings: IndexSettings, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure the methods, which take turns after one warm-up round.

    ``plain`` prefills the same rows ``header + chunk`` without this library and stores nothing: transformers' own
    forward in the same batches, or vLLM's own requests for one token. ``index`` computes and stores the chunks' KV;
    ``ranked`` also computes and stores their static deviation. ``rank_cost`` is the seconds of ``ranked`` divided by
    the seconds of ``index``.
    """
    say = progress or (lambda line: None)
    steps: dict[str, Callable[[Workbench, list[Chunk]], float]] = {
        "plain": _plain_prefill,
        "index": _index,
        "ranked": partial(_index, ranking="now"),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number, name in count_rounds(settings.repeat):
        say(name)
        chunks = place.random_chunks(settings.chunks, settings.chunk_tokens, settings.seed + number)
        for step in take_turns(steps, number):
            seconds = steps[step](place, chunks)
            if number:
                taken[step].append(seconds)
    tokens = settings.chunks * settings.chunk_tokens
    medians = {name: median(seconds) for name, seconds in taken.items()}
    return {
        **place.head(settings, warmup_rounds=1, rows_per_batch=_rows(place, settings.chunk_tokens)),
        "methods": {
            name: {"seconds": seconds, "tokens_per_s": tokens / medians[name]} for name, seconds in taken.items()
        },
        "rate_index_vs_plain": medians["plain"] / medians["index"],
        "rank_cost": medians["ranked"] / medians["index"],
    }


def _plain_requests(place: Workbench, chunks: list[Chunk]) -> float:
    header = place.engine.header_ids
    prompts = [TokenizedPrompt((*header, *chunk.token_ids), ()) for chunk in chunks]
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda p: place.engine.generate(p, SamplingParams(max_tokens=1)), prompts))
    return time.perf_counter() - begin


def _index(place: Workbench, chunks: list[Chunk], ranking: Ranking = "off") -> float:
    place.forget()
    place.engine.ranking = ranking
    begin = time.perf_counter()
    place.engine.precompute(chunks)
    seconds = time.perf_counter() - begin
    for chunk in chunks:  # later rounds must not find less room than the first
        place.engine.entries.delete(chunk.token_ids)
    return seconds


def _rows(place: Workbench, chunk_tokens: int) -> int | None:
    if place.model is None:
        return None  # vLLM's scheduler decides
    return rows_per_batch(place.device, len(place.engine.header_ids) + chunk_tokens)


@torch.inference_mode()
def _plain_prefill(place: Workbench, chunks: list[Chunk]) -> float:
    model, header = place.model, place.engine.header_ids
    place.forget()
    if model is None:
        return _plain_requests(place, chunks)
    rows = [[*header, *chunk.token_ids] for chunk in chunks]
    size = rows_per_batch(place.device, len(rows[0]))
    with own_attention(model):
        begin = time.perf_counter()
        for start in range(0, len(rows), size):
            ids = torch.tensor(rows[start : start + size], device=place.device)
            model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1, 0].item()
        return time.perf_counter() - begin
