"""Generates the model's own answers to questions in batches; training reproduces these answers from blended KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache


class Answered(NamedTuple):
    """Holds a prompt's answer and the prompt's KV.

    Attributes:
        number: Number of the prompt.
        answer: Token ids of the answer.
        cache: KV of the prompt without its last token, one row.
    """

    number: int
    answer: tuple[int, ...]
    cache: DynamicCache


def greedy(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, ends: frozenset[int], batch_tokens: int
) -> list[tuple[int, ...]]:
    """Return the model's greedy answers to prompts; see :func:`answered`."""
    found: list[tuple[int, ...]] = [()] * len(prompts)
    for one in answered(model, prompts, tokens, ends, batch_tokens):
        found[one.number] = one.answer
    return found


@torch.no_grad()
def answered(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, ends: frozenset[int], batch_tokens: int
) -> Iterator[Answered]:
    """Answer prompts greedily, the longest first; an answer includes its end token, if generated.

    Args:
        model: A causal LM.
        prompts: Token ids of the prompts.
        tokens: Most tokens of an answer.
        ends: Tokens that end an answer.
        batch_tokens: Most tokens of a batch of prompts and answers, padding included; a batch has at least one prompt.
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    at = 0
    while at < len(order):
        width = len(prompts[order[at]])
        numbers = order[at : at + max(1, batch_tokens // (width + tokens))]
        rows = [prompts[number] for number in numbers]
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        # Override models' own generation settings: sampling, repetition penalties, caches limited to a window.
        cache = DynamicCache()
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )[:, width:].tolist()
        for row, number in enumerate(numbers):
            end = next((i + 1 for i, token in enumerate(out[row]) if token in ends), len(out[row]))
            own = DynamicCache()
            for layer, one in enumerate(cache.layers):
                first = width - len(prompts[number])
                own.update(*(side[row : row + 1, :, first : width - 1] for side in (one.keys, one.values)), layer)
            yield Answered(number, tuple(out[row][:end]), own)
        at += len(numbers)
