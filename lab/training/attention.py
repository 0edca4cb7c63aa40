"""Computes causal attention in blocks of queries, for training on CPUs whose matrix products are fast in bf16.

PyTorch's fused kernel uses less memory, but multiplies more slowly than plain products on these CPUs. At the lengths of
the demo's prompts, plain products take two thirds of the fused kernel's time, and their memory is available.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Queries in a block. A block uses keys up to the block's end only, which saves almost half of all products."""


class _BlockedAttention(torch.autograd.Function):
    """Stores the attention weights for the backward pass instead of recomputing them."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention's outputs.

        Shapes are as in `causal_attention`, but the heads that share keys and values have a dimension of their own.
        """
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
        # Sum over blocks in fp32, as the fused kernel does.
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
    """Return the causal attention's outputs, (batch, heads, tokens, head_dim).

    Args:
        queries: (batch, heads, tokens, head_dim).
        keys: (batch, kv_heads, tokens, head_dim); heads / kv_heads query heads share one KV head.
        values: (batch, kv_heads, tokens, head_dim).
    """
    batch, heads, tokens, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], heads // keys.shape[1], tokens, dim)
    out: Tensor = _BlockedAttention.apply(grouped, keys, values)  # type: ignore[no-untyped-call]
    return out.reshape(batch, heads, tokens, dim)


def _flat(x: Tensor) -> Tensor:
    """Join the heads of a group along the token dimension, as rows of one product."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _future(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)
