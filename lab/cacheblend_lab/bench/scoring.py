"""Measures the speed of scoring answers over stored KV, against prefilling each chunk, question and answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from cacheblend_lab.measure import check_positive, count_rounds, take_turns
from cacheblend_lab.scoring import score
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.calibrate.rounding import own_attention
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk

Logprobs = list[list[float]]


@dataclass(frozen=True)
class ScoreSettings:
    """Holds the sizes of what is scored in every round: the same answer behind each chunk and the question.

    Attributes:
        chunks: Number of chunks in a round.
        chunk_tokens: Tokens in each chunk.
        question_tokens: Tokens in the question.
        answer_tokens: Tokens in the answer.
        repeat: Timed rounds of each method.
        seed: Seed of the random tokens.
    """

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
