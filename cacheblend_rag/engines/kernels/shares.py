"""Adds up how much scattered queries attend to each key, without the scores of all queries by all keys in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cacheblend_rag.engines.kernels.attention import constants


def add_shares(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    shares: torch.Tensor,
    lse: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """Add to ``total`` the weights with which ``query`` attends to each key, the mean over heads, times each query's share.

    Args:
        query: ``[queries, heads, head_dim]``, a head's dimensions side by side.
        keys: ``[kv_heads, keys, head_dim]``; those behind the last query's position are not read.
        positions: ``[queries]``, ascending, int64, on the device.
        shares: ``[queries]``, fp32.
        lse: ``[queries, heads]``, as :func:`~cacheblend_rag.engines.kernels.attention.attend` gives it.
        total: ``[kv_heads, keys]``, fp32, contiguous; a KV head's sum is over the heads that share it.
        scale: Of the scores.
        window: How many keys a query sees at the most, its own included; None for all.
    """
    count, heads, _ = query.shape
    kv_heads, length, _ = keys.shape
    assert query.stride(2) == 1
    assert lse.is_contiguous()
    assert total.is_contiguous()
    made = constants(query, kv_heads, window)
    _add_shares[triton.cdiv(length, made["KEYS"]), kv_heads](
        query,
        keys,
        positions.contiguous(),
        shares.contiguous(),
        lse,
        total,
        count,
        length,
        float(scale) * 1.4426950408889634,  # exp2 is what the device computes
        1 / heads,
        *query.stride()[:2],
        *keys.stride(),
        **made,
    )


@triton.jit(do_not_specialize=["count", "length"])
def _add_shares(
    query,
    keys,
    positions,
    shares,
    lse,
    total,
    count,
    length,
    scale,
    factor,
    query_token,
    query_head,
    keys_head,
    keys_token,
    keys_dim,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go through all queries for ``KEYS`` keys of one KV head."""
    queries: tl.constexpr = ROWS // GROUP
    begin, kv_head = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64)
    key, dim, row = begin + tl.arange(0, KEYS), tl.arange(0, DIM_UP), tl.arange(0, ROWS)
    seen = tl.load(positions + count - 1).to(tl.int32) + 1
    there = (dim < DIM)[:, None] & (key < seen)[None, :]
    keys += kv_head * keys_head
    k = tl.load(keys + (key.to(tl.int64) * keys_token)[None, :] + dim[:, None] * keys_dim, mask=there, other=0.0)
    head = kv_head * GROUP + row % GROUP
    added = tl.zeros([KEYS], tl.float32)
    for first in range(0, tl.where(begin < seen, count, 0), queries):
        token = first + row // GROUP
        real = (row < queries * GROUP) & (token < count)
        at = tl.minimum(token, count - 1).to(tl.int64)
        position = tl.load(positions + at)
        share = tl.load(shares + at, mask=real, other=0.0)
        log = tl.load(lse + at * (tl.num_programs(1) * GROUP) + head)
        inside = real[:, None] & (dim < DIM)[None, :]
        q = tl.load(query + (at * query_token + head * query_head)[:, None] + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        weights = tl.where(visible, tl.exp2(scores - log[:, None]), 0.0)
        added += tl.sum(weights * share[:, None], 0)
    into, inside = total + kv_head * length + key, key < length
    tl.store(into, tl.load(into, mask=inside, other=0.0) + added * factor, mask=inside)
