"""Lets the model answer questions itself, many at once: those are the answers that it must give again from blended KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


@torch.no_grad()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: frozenset[int],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[int, ...]]:
    """Return the model's greedy answers to prompts, each with the token that ends it, if it came.

    Args:
        model: A causal LM.
        prompts: Their token ids.
        tokens: Most tokens of an answer.
        ends: Tokens that end one.
        batch_tokens: Most tokens of prompts at once, padding included.
        progress: Told how many prompts are answered.
    """
    found: list[tuple[int, ...]] = [()] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    at = 0
    while at < len(order):
        width = len(prompts[order[at]])
        numbers = order[at : at + max(1, batch_tokens // (width + tokens))]
        rows = [prompts[number] for number in numbers]
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        # Some models' own settings would sample or punish repetition.
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )[:, width:].tolist()
        for number, row in zip(numbers, out, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            found[number] = tuple(row[:end])
        at += len(numbers)
        if progress is not None:
            progress(at)
    return found
