"""Measures the rates of indexing chunks and of scoring answers over stored KV, against plain prefills."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from cacheblend_lab.measure import check_positive, count_rounds, take_turns
from cacheblend_lab.scoring import score
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.calibrate.rounding import own_attention
from cacheblend_rag.engines.entries import Ranking
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.precompute import rows_per_batch
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class IndexSettings:
    """Holds the size of what is indexed in every round."""

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


Logprobs = list[list[float]]


@dataclass(frozen=True)
class ScoreSettings:
    """Holds the sizes of what is scored in every round: the same answer behind each chunk and the question."""

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    answer_tokens: int = 8
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a size below 1."""
        check_positive(self, "chunks", "chunk_tokens", "question_tokens", "answer_tokens", "repeat")


def bench_score(
    place: Workbench, settings: ScoreSettings, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure the methods, which take turns after one warm-up round.

    ``cached`` is :func:`cacheblend_lab.scoring.score` over stored KV. ``prefill`` is transformers' own forward of the
    whole text, without this library. ``largest_difference`` is the largest difference between the log-probabilities of
    an answer token by the two methods.

    Raises:
        InputError: The engine runs its model elsewhere, so that ``prefill`` cannot be measured.
    """
    if place.model is None:
        raise InputError("This measurement runs the model itself, too; use --engine transformers.")
    say = progress or (lambda line: None)
    steps: dict[str, Callable[[list[Chunk], Sequence[int]], Logprobs]] = {
        "cached": lambda chunks, answer: _cached(place, settings, chunks, answer),
        "prefill": lambda chunks, answer: _prefilled(place, settings, chunks, answer),
    }
    chunks = place.random_chunks(settings.chunks, settings.chunk_tokens, settings.seed)
    answer = place.random_chunks(1, settings.answer_tokens, settings.seed + 2)[0].token_ids
    place.engine.ranking = "off"
    place.engine.precompute(chunks)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    found: dict[str, Logprobs] = {}
    for number, name in count_rounds(settings.repeat):
        say(name)
        for step in take_turns(steps, number):
            begin = time.perf_counter()
            found[step] = steps[step](chunks, answer)
            if number:
                taken[step].append((time.perf_counter() - begin) / settings.chunks)
    difference = max(
        abs(a - b) for mine, theirs in zip(*found.values(), strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    return {
        **place.head(settings, warmup_rounds=1),
        "methods": {name: {"seconds_per_pair": seconds} for name, seconds in taken.items()},
        "speedup": median(taken["prefill"]) / median(taken["cached"]),
        "largest_difference": difference,
    }


def _cached(place: Workbench, settings: ScoreSettings, chunks: list[Chunk], answer: Sequence[int]) -> Logprobs:
    place.forget()
    prompts = (place.prompt([chunk], settings.question_tokens, settings.seed) for chunk in chunks)
    return [list(score(place.engine, prompt, [answer])[0].token_logprobs) for prompt in prompts]


@torch.inference_mode()
def _prefilled(place: Workbench, settings: ScoreSettings, chunks: list[Chunk], answer: Sequence[int]) -> Logprobs:
    found = []
    wanted = torch.tensor([list(answer)], device=place.device).T
    with own_attention(place.model):
        for chunk in chunks:
            ids = [*place.prompt([chunk], settings.question_tokens, settings.seed).token_ids, *answer]
            kept = len(answer) + 1
            rows = place.model(input_ids=torch.tensor([ids], device=place.device), logits_to_keep=kept).logits[0, :-1]
            found.append(rows.float().log_softmax(-1).gather(1, wanted)[:, 0].tolist())
    return found
