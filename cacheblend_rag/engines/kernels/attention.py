"""Computes attention of scattered queries, each of which sees keys up to its own position, and sums attention weights.

One launch computes all queries of a pass. One program takes a few neighbouring queries with all heads that share one KV
head, and reads keys up to its last query's position; only keys behind its first query's position are masked. Scores,
sums of weights and the result are computed in fp32. For the product with the values, weights are converted to the
values' dtype, as in FlashAttention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """Sizes a program: rows (queries times the heads that share a KV head), keys per step, and warps of 32 threads."""

    rows: int
    keys: int
    warps: int


def tile(dtype: torch.dtype, group: int, dim: int) -> Tile:
    """Return the tile for heads of ``dim``, ``group`` of which share a KV head; on Hopper no tile spills registers."""
    if dtype == torch.float32:
        return Tile(max(32, triton.next_power_of_2(group)), 16, 8)
    return Tile(max(64, triton.next_power_of_2(group)), 64 if dim <= 128 else 32, 4)


def constants(query: torch.Tensor, kv_heads: int, window: int | None) -> dict[str, Any]:
    """Return the compile-time constants of a kernel for ``query``, ``[queries, heads, head_dim]``."""
    _, heads, dim = query.shape
    rows, step, warps = tile(query.dtype, heads // kv_heads, dim)
    return {
        "DIM": dim,
        "DIM_UP": max(16, triton.next_power_of_2(dim)),
        "GROUP": heads // kv_heads,
        "ROWS": rows,
        "KEYS": step,
        "WINDOW": window or 0,
        # By default, Triton would round fp32 to 10 bits for the tensor cores.
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": 2,
    }


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Write the attention of ``query`` to ``out``.

    Args:
        query: ``[queries, heads, head_dim]``, contiguous in the last dimension.
        keys: ``[pages, kv_heads, page_tokens, head_dim]``, with any strides.
        values: ``[pages, kv_heads, page_tokens, head_dim]``, with any strides.
        positions: ``[queries]``, ascending, int64, on the device; a query sees the keys at positions up to its own.
        table: The sequence's pages in order, int32, on the device; None if the sequence lies in the first page alone.
        out: Output, in the shape of ``query``.
        scale: Factor of the scores.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for no cap.
        window: Maximum number of keys that a query sees, its own included; None for all.
        sinks: ``[heads]``, scores of one more key that each query sees, with value 0 (gpt-oss); None for no such key.
        lse: Output for the log-sum-exp of each query's scores, to base 2, ``[queries, heads]``, fp32, contiguous; None
            for no output.
    """
    assert query.stride(2) == out.stride(2) == 1
    count, positions = len(query), positions.contiguous()
    made = constants(query, keys.shape[1], window)
    _attend[triton.cdiv(count, made["ROWS"] // made["GROUP"]), keys.shape[1]](
        query,
        keys,
        values,
        positions,
        positions if table is None else table,
        positions if sinks is None else sinks.contiguous(),
        out,
        out if lse is None else lse,
        count,
        float(scale),
        float(soft_cap),
        *query.stride()[:2],
        *out.stride()[:2],
        *keys.stride(),
        *values.stride(),
        PAGE=0 if table is None else keys.shape[2],
        CAPPED=soft_cap > 0,
        SINKS=sinks is not None,
        LSE=lse is not None,
        **made,
    )


@triton.jit(do_not_specialize=["count"])
def _attend(
    query, keys, values, positions, table, sinks, out, lse, count, scale, soft_cap,
    query_token, query_head, out_token, out_head,
    keys_page, keys_head, keys_token, keys_dim, values_page, values_head, values_token, values_dim,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from ``ROWS // GROUP`` queries with the ``GROUP`` heads of one KV head."""
    queries: tl.constexpr = ROWS // GROUP
    # The last queries see the most keys, so they start first: no program then runs alone at the end.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    kv_head = tl.program_id(1).to(tl.int64)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_UP)
    token = begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < queries * GROUP) & (token < count)
    end = tl.minimum(begin + queries, count) - 1
    position = tl.load(positions + tl.minimum(token, end))
    nearest = tl.load(positions + begin).to(tl.int32)
    seen = tl.load(positions + end).to(tl.int32) + 1

    inside = real[:, None] & (dim < DIM)[None, :]
    at = token.to(tl.int64)
    q = tl.load(query + (at * query_token + head * query_head)[:, None] + dim[None, :], mask=inside, other=0.0)
    keys += kv_head * keys_head
    values += kv_head * values_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a sink adds its weight, but no value
        top = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    joined = tl.zeros([ROWS, DIM_UP], tl.float32)

    # All queries see the keys up to the first query's position, but for keys that a window hides from some queries.
    if WINDOW > 0:
        oldest = tl.maximum(nearest + 1 - WINDOW, 0)
        masked_from = oldest // KEYS * KEYS
    else:
        oldest = 0
        masked_from = (nearest + 1) // KEYS * KEYS
    for key in range(oldest // KEYS * KEYS, masked_from, KEYS):
        top, total, joined = _add_keys(
            top, total, joined, q, key, position, oldest, seen, keys, values, table, scale, soft_cap, keys_page,
            keys_token, keys_dim, values_page, values_token, values_dim, False, PAGE, DIM, DIM_UP, KEYS, CAPPED, WINDOW,
            PRECISION,
        )  # fmt: skip
    for key in range(masked_from, seen, KEYS):
        top, total, joined = _add_keys(
            top, total, joined, q, key, position, oldest, seen, keys, values, table, scale, soft_cap, keys_page,
            keys_token, keys_dim, values_page, values_token, values_dim, True, PAGE, DIM, DIM_UP, KEYS, CAPPED, WINDOW,
            PRECISION,
        )  # fmt: skip
    if LSE:
        heads = tl.num_programs(1) * GROUP
        tl.store(lse + at * heads + head, top + tl.log2(total), mask=real)
    result = (joined / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (at * out_token + head * out_head)[:, None] + dim[None, :], result, mask=inside)


@triton.jit
def _add_keys(
    top, total, joined, q, begin, position, oldest, seen, keys, values, table, scale, soft_cap,
    keys_page, keys_token, keys_dim, values_page, values_token, values_dim,
    MASKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``KEYS`` keys from ``begin`` on to the rows' highest score, sum of weights and weighted values."""
    key, dim = begin + tl.arange(0, KEYS), tl.arange(0, DIM_UP)
    # Constants without masking, so that the compiler drops them.
    there = tl.full([KEYS], 1, tl.int1)
    in_head = tl.full([DIM_UP], 1, tl.int1)
    if MASKED:
        there = (key >= oldest) & (key < seen)
    if DIM < DIM_UP:
        in_head = dim < DIM
    row = key.to(tl.int64)
    if PAGE > 0:
        # Pages may be missing before and behind the visible keys.
        page = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        row = row % PAGE
        keys_at, values_at = page * keys_page + row * keys_token, page * values_page + row * values_token
    else:
        keys_at, values_at = row * keys_token, row * values_token
    real = in_head[:, None] & there[None, :]
    k = tl.load(keys + keys_at[None, :] + dim[:, None] * keys_dim, mask=real, other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if CAPPED:
        scores = soft_cap * (2 * tl.sigmoid(2 * scores / soft_cap) - 1)  # tanh
    scores *= 1.4426950408889634  # log2(e): the device computes exp2
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row whose window begins behind these keys has seen no key yet.
    base = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW > 0 else higher
    faded = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * faded + tl.sum(weights, 1)
    # Memory of keys that no query sees may hold any numbers, and 0 times NaN is NaN.
    real = there[:, None] & in_head[None, :]
    v = tl.load(values + values_at[:, None] + dim[None, :] * values_dim, mask=real, other=0.0)
    joined = joined * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, joined


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
    """Add the attention weights of ``query`` to each key to ``total``: the mean over heads, times each query's share.

    Args:
        query: ``[queries, heads, head_dim]``, contiguous in the last dimension.
        keys: ``[kv_heads, keys, head_dim]``; keys behind the last query's position are not read.
        positions: ``[queries]``, ascending, int64, on the device.
        shares: ``[queries]``, fp32.
        lse: ``[queries, heads]``, from :func:`attend`.
        total: ``[kv_heads, keys]``, fp32, contiguous; each KV head sums over the heads that share the KV head.
        scale: Factor of the scores.
        window: Maximum number of keys that a query sees, its own included; None for all.
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
        float(scale) * 1.4426950408889634,  # log2(e): the device computes exp2
        1 / heads,
        *query.stride()[:2],
        *keys.stride(),
        **made,
    )


@triton.jit(do_not_specialize=["count", "length"])
def _add_shares(
    query, keys, positions, shares, lse, total, count, length, scale, factor,
    query_token, query_head, keys_head, keys_token, keys_dim,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights of all queries for ``KEYS`` keys of one KV head."""
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
