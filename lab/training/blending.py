"""Blends on the training model, as a small, independent reference for the demo model's answers.

The batch size is 1 throughout. A KV cache is a list with one (keys, values) pair per layer, each (1, kv_heads, tokens,
head_dim); the keys are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from training.model import DemoModel, rope_table, rotate

KV = list[tuple[Tensor, Tensor]]
Score = Literal["hkvd", "random", "oracle"]


@dataclass(frozen=True)
class Prompt:
    """Holds the token ids of a prompt up to the question: a header, then chunks with gaps between them."""

    header: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    gap: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """Return all ids in order."""
        ids = list(self.header)
        for index, chunk in enumerate(self.chunks):
            ids += [*(self.gap if index else ()), *chunk]
        return ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return start and end of every chunk in `ids`."""
        spans, start = [], len(self.header)
        for chunk in self.chunks:
            spans.append((start, start + len(chunk)))
            start += len(chunk) + len(self.gap)
        return spans


def prefill(model: DemoModel, ids: Sequence[int]) -> KV:
    """Return the KV cache of an ordinary prefill."""
    cos, sin = rope_table(torch.arange(len(ids)), model.shape)
    x = model.embed_tokens(torch.tensor([ids]))
    cache: KV = []
    for layer in model.blocks:
        q, k, v = layer.qkv(x)
        k = rotate(k, cos, sin)
        cache.append((k, v))
        x = layer.finish(x, rotate(q, cos, sin), k, v)
    return cache


def place_chunks(model: DemoModel, prompt: Prompt) -> KV:
    """Return a cache for `prompt.ids` with the chunks' KV, computed behind the header; header and gaps are zero."""
    size, shape = len(prompt.ids), model.shape
    placed: KV = [
        (torch.zeros(1, shape.kv_heads, size, shape.head_dim), torch.zeros(1, shape.kv_heads, size, shape.head_dim))
        for _ in model.blocks
    ]
    head = len(prompt.header)
    for chunk, (start, end) in zip(prompt.chunks, prompt.spans, strict=True):
        cos, sin = rope_table(torch.full((len(chunk),), start - head), shape)
        for (keys, values), (k, v) in zip(placed, prefill(model, [*prompt.header, *chunk]), strict=True):
            keys[:, :, start:end] = rotate(k[:, :, head:], cos, sin)
            values[:, :, start:end] = v[:, :, head:]
    return placed


def _deviation(fresh: tuple[Tensor, Tensor], stale: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared difference of keys and values for each token, (tokens,)."""
    return sum(((a - b) ** 2).sum((0, 1, 3)) for a, b in zip(fresh, stale, strict=True))  # type: ignore[return-value]


def _oracle(full: KV, placed: KV) -> Tensor:
    """Return each token's deviation over all layers but the first, (tokens,), scaled per layer, keys and values."""
    total = torch.zeros(full[0][0].shape[2])
    for fresh, stale in zip(full[1:], placed[1:], strict=True):
        for a, b in zip(fresh, stale, strict=True):
            total += ((a - b) ** 2).sum((0, 1, 3)) / (a**2).mean()
    return total


def blend(
    model: DemoModel,
    prompt: Prompt,
    placed: KV,
    *,
    check: int,
    ratio: float,
    score: Score = "hkvd",
    full: KV | None = None,
) -> KV:
    """Return the cache of a blended prefill.

    Args:
        model: The model.
        prompt: The prompt.
        placed: Result of `place_chunks` for the prompt.
        check: Layer whose deviation selects tokens; earlier layers compute every token. 0 with ratio 0 is full KV
            reuse.
        ratio: Share of the chunks' tokens to recompute, besides header and gaps.
        score: "hkvd", "random", or "oracle" (the deviation of all layers, from `full`).
        full: Result of `prefill` for the prompt, for the oracle.
    """
    ids = prompt.ids
    size = len(ids)
    positions = torch.arange(size)
    cos, sin = rope_table(positions, model.shape)
    chunk_mask = torch.zeros(size, dtype=torch.bool)
    for start, end in prompt.spans:
        chunk_mask[start:end] = True
    x = model.embed_tokens(torch.tensor([ids]))
    chosen: Tensor | None = None
    cache: KV = []
    for index, layer in enumerate(model.blocks):
        q, k, v = layer.qkv(x)
        here = positions if chosen is None else chosen
        q, k = rotate(q, cos[here], sin[here]), rotate(k, cos[here], sin[here])
        if index < check:
            cache.append((k, v))
            x = layer.finish(x, q, k, v)
            continue
        if chosen is None:
            if score == "oracle" and full is not None:
                deviation = _oracle(full, placed)
            elif score == "random":
                deviation = torch.rand(size)
            else:
                deviation = _deviation((k, v), placed[index])
            deviation[~chunk_mask] = torch.inf
            count = int((~chunk_mask).sum()) + round(ratio * int(chunk_mask.sum()))
            chosen = deviation.topk(count).indices.sort().values
            x, q, k, v = x[:, chosen], q[:, :, chosen], k[:, :, chosen], v[:, :, chosen]
        keys, values = placed[index][0].clone(), placed[index][1].clone()
        keys[:, :, chosen], values[:, :, chosen] = k, v
        cache.append((keys, values))
        mask = (positions[None] <= chosen[:, None])[None, None]
        x = layer.finish(x, q, keys, values, mask)
    return cache


def answers_match(model: DemoModel, cache: KV, questions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[bool]:
    """Return for each (question ids, answer ids) whether greedy decoding after `cache` gives exactly the answer.

    All questions run in one pass; each question attends to the cache and itself only. Teacher forcing gives the same
    result as decoding.
    """
    size = cache[0][0].shape[2]
    joined = [[*question, *answer] for question, answer in questions]
    ids = torch.tensor([[token for part in joined for token in part]])
    within = torch.cat([torch.arange(len(part)) for part in joined])
    owner = torch.cat([torch.full((len(part),), i) for i, part in enumerate(joined)])
    own = (owner[:, None] == owner[None]) & (within[None] <= within[:, None])
    mask = torch.cat([torch.ones(len(owner), size, dtype=torch.bool), own], 1)[None, None]
    cos, sin = rope_table(within + size, model.shape)
    x = model.embed_tokens(ids)
    for layer, (keys, values) in zip(model.blocks, cache, strict=True):
        q, k, v = layer.qkv(x)
        k = rotate(k, cos, sin)
        x = layer.finish(x, rotate(q, cos, sin), torch.cat([keys, k], 2), torch.cat([values, v], 2), mask)
    predicted = model.logits(model.norm(x))[0].argmax(-1).tolist()
    results, end = [], 0
    for question, answer in questions:
        end += len(question) + len(answer)
        results.append(predicted[end - len(answer) - 1 : end - 1] == list(answer))
    return results
