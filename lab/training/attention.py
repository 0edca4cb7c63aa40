"""Computes causal attention in blocks of queries, for training on CPUs whose matrix products are fast in bf16.

PyTorch's fused kernel reads less memory and multiplies at less than the rate that plain products reach there; at the
lengths of the demo's prompts these take two thirds of its time, and the memory is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Queries a block: each sees the keys up to its block's end, so half of all products is left out."""


class _BlockedAttention(torch.autograd.Function):
    """Keeps the attention weights for the backward pass instead of computing them again."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend; shapes as in `causal_attention`, with heads that share keys and values in a dimension of their own."""
        tokens, scale = queries.shape[-2], queries.shape[-1] ** -0.5
        out = torch.empty_like(queries)
        weights = []
        for start in range(0, tokens, BLOCK):
            end = min(start + BLOCK, tokens)
            scores = _flat(queries[..., start:end, :] * scale) @ keys[..., :end, :].transpose(-1, -2)
            scores = scores.view(*queries.shape[:3], end - start, end)
            scores[..., start:].masked_fill_(_future(end - start), -torch.inf)
            weight = scores.softmax(-1)
            out[..., start:end, :] = (_flat(weight) @ values[..., :end, :]).view_as(out[..., start:end, :])
            weights.append(weight)
        ctx.save_for_backward(queries, keys, values, out, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        (gradient,) = gradients
        queries, keys, values, out, *weights = ctx.saved_tensors
        scale = queries.shape[-1] ** -0.5
        for_queries = torch.empty_like(queries)
        # Sums over blocks, in fp32 as the fused kernel does it.
        for_keys, for_values = (
            torch.zeros_like(keys, dtype=torch.float32),
            torch.zeros_like(values, dtype=torch.float32),
        )
        share = (gradient.float() * out.float()).sum(-1, keepdim=True).to(gradient.dtype)
        start = 0
        for weight in weights:
            end = start + weight.shape[-2]
            part = _flat(gradient[..., start:end, :])
            for_values[..., :end, :] += _flat(weight).transpose(-1, -2) @ part
            score = (part @ values[..., :end, :].transpose(-1, -2)).view_as(weight)
            score = _flat(score.sub_(share[..., start:end, :]).mul_(weight))
            for_queries[..., start:end, :] = (score @ keys[..., :end, :]).view_as(queries[..., start:end, :]) * scale
            for_keys[..., :end, :] += score.transpose(-1, -2) @ _flat(queries[..., start:end, :] * scale)
            start = end
        return for_queries, for_keys.to(keys.dtype), for_values.to(values.dtype)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what each query attends to among the keys up to its own place.

    Args:
        queries: (batch, heads, tokens, head_dim).
        keys: (batch, kv_heads, tokens, head_dim); heads / kv_heads queries share one.
        values: As the keys.
    """
    batch, heads, tokens, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], heads // keys.shape[1], tokens, dim)
    out: Tensor = _BlockedAttention.apply(grouped, keys, values)  # type: ignore[no-untyped-call]
    return out.reshape(batch, heads, tokens, dim)


def _flat(x: Tensor) -> Tensor:
    """Put the heads of a group behind one another, as more rows of one product."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _future(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)
