"""Places stored KV in a KV cache, keys rotated on the way, a layer or several in one launch; nothing in between is written.

Equal bit for bit to :func:`~cacheblend_rag.blending.rope.moved` and a copy: each product is rounded to fp32, as torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cacheblend_rag.blending.bulk import Arrivals, StoredLayers, bring
from cacheblend_rag.blending.rope import Move
from cacheblend_rag.blending.transfer import Transfer, sent
from cacheblend_rag.store.kv import LayerKV

# Tokens of one head that one program moves, and its threads in units of 32: few enough numbers for each to stay in registers.
_TOKENS, _WARPS = 32, 8
_STEP = 16


class TokenTable(NamedTuple):
    """Says where the tokens of several spans lie in one piece of memory, in which each span's layers follow one another.

    An entry's layer is ``[keys and values, kv_heads, its tokens, head_dim]``. All tensors are ``[tokens]``, int64, on the device.

    Attributes:
        before: How many tokens the entries in front of the token's own have together.
        within: Which of its own entry's tokens it is.
        length: How many tokens its entry has.
        slots: Where it belongs in the cache.
    """

    before: torch.Tensor
    within: torch.Tensor
    length: torch.Tensor
    slots: torch.Tensor


class Layers(NamedTuple):
    """Says where the caches of layers lie that are alike.

    Attributes:
        keys: The first layer's, ``[pages, kv_heads, page_tokens, head_dim]``, in whatever order in memory.
        values: Likewise.
        offsets: ``[layers]``, int64, on the device: how many numbers behind the first layer's each layer's keys and values are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, caches: Sequence[LayerKV]) -> Layers | None:
        """Describe the ``caches`` of layers; None where they are not alike, or not a multiple of 16 numbers apart."""
        (keys, values), size = caches[0], caches[0].k.element_size()

        def like(cache: LayerKV) -> tuple[object, ...]:
            between = cache.v.data_ptr() - cache.k.data_ptr()
            return *cache.k.shape, *cache.k.stride(), *cache.v.shape, *cache.v.stride(), cache.k.dtype, between

        if len({like(cache) for cache in caches}) > 1 or keys.shape != values.shape:
            return None
        offsets = [(cache.k.data_ptr() - keys.data_ptr()) // size for cache in caches]
        if any(offset % _STEP for offset in offsets):
            return None
        return cls(keys, values, torch.tensor(offsets, device=keys.device))


def place_layers(memory: torch.Tensor, staged: TokenTable, move: Move | None, layers: Layers) -> None:
    """Write the tokens of several layers, moved, in one launch.

    Args:
        memory: ``[elements]``, what ``staged`` speaks of, on the cache's device: in its dtype, or in rows
            (:func:`~cacheblend_rag.store.codec.coded`), ``[bytes]``, uint8.
        staged: Where each token lies, and where it belongs.
        move: What the keys still need, the same in all these layers; None for nothing.
        layers: Which ``memory`` holds of each entry.
    """
    keys, values, offsets = layers
    _, heads, size, dim = keys.shape
    tokens, coded = len(staged.slots), memory.dtype == torch.uint8
    assert keys.dtype == values.dtype
    assert coded or memory.dtype == keys.dtype
    cos, sin = _turn(move, memory)
    _place_layers[triton.cdiv(tokens, _TOKENS), heads, len(offsets)](
        memory.view(torch.int8) if coded else memory,
        memory.view(keys.dtype),
        *staged,
        cos,
        sin,
        keys,
        values,
        offsets,
        tokens,
        tokens if move is None else move.first,
        *keys.stride(),
        *values.stride(),
        PAGE=size if keys.shape[0] > 1 else 0,
        HEADS=heads,
        SCALE=keys.element_size() if coded else 0,
        **_constants(move, dim),
    )


def _turn(move: Move | None, instead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of a move; ``instead``, which is not read, where there is none."""
    return (instead, instead) if move is None else (move.rotation.cos.contiguous(), move.rotation.sin.contiguous())


def _constants(move: Move | None, dim: int) -> dict[str, int | bool]:
    """Return what both kernels are compiled for: heads of ``dim``, and how a move turns them."""
    half = 0 if move is None else move.rotation.cos.shape[1]
    return {
        "DIM": dim,
        "DIM_UP": triton.next_power_of_2(dim),
        "HALF": half,
        "HALF_UP": triton.next_power_of_2(max(half, 1)),
        "REST_UP": triton.next_power_of_2(max(dim - 2 * half, 1)),
        "INTERLEAVED": move is not None and move.layout == "interleaved",
        "TOKENS": _TOKENS,
        "num_warps": _WARPS,
        # A fused multiply-add would skip the rounding of one product.
        "enable_fp_fusion": False,
    }


def place(kv: LayerKV, move: Move | None, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``kv``, moved, at ``slots`` of a cache.

    Args:
        kv: ``[kv_heads, tokens, head_dim]``, on the cache's device and in its dtype, a head's dimensions side by side.
        move: What its keys still need; None for nothing.
        slots: ``[tokens]``, int64: page times tokens of a page, plus the token in its page.
        keys: The cache's keys, ``[pages, kv_heads, page_tokens, head_dim]``, in whatever order in memory.
        values: The cache's values, likewise.
    """
    heads, tokens, dim = kv.k.shape
    assert kv.k.stride(2) == kv.v.stride(2) == 1
    assert kv.k.dtype == keys.dtype == values.dtype
    cos, sin = _turn(move, kv.k)
    _place[triton.cdiv(tokens, _TOKENS), heads](
        kv.k,
        kv.v,
        cos,
        sin,
        slots.contiguous(),
        keys,
        values,
        tokens,
        tokens if move is None else move.first,
        *kv.k.stride()[:2],
        *kv.v.stride()[:2],
        *keys.stride(),
        *values.stride(),
        PAGE=keys.shape[2] if keys.shape[0] > 1 else 0,
        **_constants(move, dim),
    )


def place_in_bulk(
    stored: StoredLayers,
    slots: torch.Tensor,
    layers: Layers,
    transfer: Transfer,
    arrivals: Arrivals,
    *memory: torch.Tensor,
) -> None:
    """Begin to place ``stored``.

    Args:
        stored: What; in the caches' dtype.
        slots: ``[tokens]``, int64, on the device: where its tokens belong in a cache.
        layers: The caches of all layers.
        transfer: To their device.
        arrivals: Will tell when it has been placed.
        memory: The caches, where they may be freed before.
    """
    before, within, length = sent(stored.table(), slots.device)
    table = TokenTable(before, within, length, slots)

    def some(begin: int, end: int, copied: torch.Tensor) -> None:
        place_layers(copied, table, stored.moves[begin], layers._replace(offsets=layers.offsets[begin:end]))

    moves = {id(move): move for move in stored.moves if move is not None}.values()
    turned = [tensor for move in moves for tensor in (move.rotation.cos, move.rotation.sin)]
    bring(stored, transfer, arrivals, some, (*memory, *table, *turned, layers.offsets))


@triton.jit(do_not_specialize=["tokens", "first"])
def _place(
    from_keys,
    from_values,
    cos,
    sin,
    slots,
    keys,
    values,
    tokens,
    first,
    from_keys_head,
    from_keys_token,
    from_values_head,
    from_values_token,
    keys_page,
    keys_head,
    keys_token,
    keys_dim,
    values_page,
    values_head,
    values_token,
    values_dim,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Move ``TOKENS`` tokens of one head; ``*_UP`` are the powers of 2 that Triton wants for widths."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = (token < tokens)[:, None]
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    if PAGE > 0:
        page, row = slot // PAGE, slot % PAGE
    else:  # one page, whose length is not worth a compilation
        page, row = slot * 0, slot
    from_keys += (head * from_keys_head + token * from_keys_token)[:, None]
    from_values += (head * from_values_head + token * from_values_token)[:, None]
    keys += (page * keys_page + head * keys_head + row * keys_token)[:, None]
    values += (page * values_page + head * values_head + row * values_token)[:, None]

    _move(
        from_keys, from_values, 1, 1, cos, sin, keys, values, token, real, first, keys_dim, values_dim, False, DIM, DIM_UP, HALF,
        HALF_UP, REST_UP, INTERLEAVED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first"])
def _place_layers(
    memory,
    scales,
    before,
    within,
    length,
    slots,
    cos,
    sin,
    keys,
    values,
    offsets,
    tokens,
    first,
    keys_page,
    keys_head,
    keys_token,
    keys_dim,
    values_page,
    values_head,
    values_token,
    values_dim,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Move ``TOKENS`` tokens of one head of one layer; of rows that end with a scale of ``SCALE`` bytes, if it is not 0."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0)
    rows = tl.load(length + token, mask=there, other=0)
    ahead = tl.load(before + token, mask=there, other=0) * tl.num_programs(2) + layer * rows  # whole rows of all heads
    begin = 2 * HEADS * ahead + head * rows + tl.load(within + token, mask=there, other=0)
    from_keys = memory + (begin * (DIM + SCALE))[:, None]
    from_values = memory + ((begin + HEADS * rows) * (DIM + SCALE))[:, None]
    if SCALE > 0:
        last = ((begin + 1) * (DIM + SCALE) // SCALE - 1)[:, None]
        keys_by = tl.load(scales + last, mask=there[:, None])
        values_by = tl.load(scales + last + HEADS * rows[:, None] * (DIM + SCALE) // SCALE, mask=there[:, None])
    else:
        keys_by, values_by = 1, 1
    if PAGE > 0:
        page, row = slot // PAGE, slot % PAGE
    else:
        page, row = slot * 0, slot
    offset = tl.multiple_of(tl.load(offsets + layer), 16)  # so that several numbers are written at once
    keys += (offset + page * keys_page + head * keys_head + row * keys_token)[:, None]
    values += (offset + page * values_page + head * values_head + row * values_token)[:, None]
    _move(
        from_keys, from_values, keys_by, values_by, cos, sin, keys, values, token, there[:, None], first, keys_dim, values_dim,
        SCALE > 0, DIM, DIM_UP, HALF, HALF_UP, REST_UP, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _load(at, by, mask, CODED: tl.constexpr):
    """Load numbers; ``CODED`` ones are whole, and ``by`` is what each counts: a power of 2, so that nothing is rounded."""
    found = tl.load(at, mask=mask)
    if CODED:
        found = (found.to(tl.float32) * by.to(tl.float32)).to(by.dtype)
    return found


@triton.jit
def _move(
    from_keys,
    from_values,
    keys_by,
    values_by,
    cos,
    sin,
    keys,
    values,
    token,
    real,
    first,
    keys_dim,
    values_dim,
    CODED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Copy the values and turn the keys of the ``real`` tokens; pointers are each token's, ``[tokens, 1]``."""
    dim = tl.arange(0, DIM_UP)[None, :]
    inside = real & (dim < DIM)
    tl.store(values + dim * values_dim, _load(from_values + dim, values_by, inside, CODED), mask=inside)

    if HALF > 0:
        pair = tl.arange(0, HALF_UP)[None, :]
        if INTERLEAVED:
            left, right = 2 * pair, 2 * pair + 1
        else:
            left, right = pair, pair + HALF
        inside = real & (pair < HALF)
        a = _load(from_keys + left, keys_by, inside, CODED)
        b = _load(from_keys + right, keys_by, inside, CODED)
        # The tokens before the first keep their bits.
        turned = inside & (token >= first)[:, None]
        at = (token - first)[:, None] * HALF + pair
        c = tl.load(cos + at, mask=turned)
        s = tl.load(sin + at, mask=turned)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        tl.store(keys + left * keys_dim, tl.where(turned, (wide_a * c - wide_b * s).to(a.dtype), a), mask=inside)
        tl.store(keys + right * keys_dim, tl.where(turned, (wide_b * c + wide_a * s).to(a.dtype), b), mask=inside)
    if 2 * HALF < DIM:
        rest = 2 * HALF + tl.arange(0, REST_UP)[None, :]
        inside = real & (rest < DIM)
        tl.store(keys + rest * keys_dim, _load(from_keys + rest, keys_by, inside, CODED), mask=inside)
