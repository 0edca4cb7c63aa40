"""Generates the model's own answers to questions in batches; training reproduces these answers from blended KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


@torch.no_grad()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, ends: frozenset[int], batch_tokens: int
) -> list[tuple[int, ...]]:
    """Return a causal LM's greedy answers to prompts; an answer includes its end token, if generated.

    Args:
        model: The model.
        prompts: Token ids of the prompts.
        tokens: Most tokens of an answer.
        ends: Tokens that end an answer.
        batch_tokens: Most tokens of a batch of prompts and answers, padding included; a batch has at least one prompt.
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
        # Override models' own generation settings: sampling, repetition penalties, caches limited to a window.
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=DynamicCache(),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )[:, width:].tolist()
        for number, answer in zip(numbers, out, strict=True):
            end = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
            found[number] = tuple(answer[:end])
        at += len(numbers)
    return found
