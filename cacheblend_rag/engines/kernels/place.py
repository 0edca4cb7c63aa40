"""Places stored KV in a KV cache and rotates the keys, one or several layers per launch, without intermediate tensors.

The result equals :func:`~cacheblend_rag.blending.rope.moved` and a copy, bit for bit: each product is rounded to fp32,
as in torch.
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

# Tokens of one head per program, and the program's warps of 32 threads: few enough numbers per thread for registers.
_TOKENS, _WARPS = 32, 8
_STEP = 16


class TokenTable(NamedTuple):
    """Locates the tokens of several entries in one piece of memory, in which the layers of each entry are adjacent.

    A layer of an entry is ``[keys and values, kv_heads, tokens, head_dim]``. All attributes are ``[tokens]``, int64, on
    the device.

    Attributes:
        before: Number of tokens in all entries before the token's entry.
        within: Index of the token in its entry.
        length: Number of tokens in the token's entry.
        slots: Slot of the token in the cache.
    """

    before: torch.Tensor
    within: torch.Tensor
    length: torch.Tensor
    slots: torch.Tensor


class Layers(NamedTuple):
    """Locates the KV caches of layers with equal shapes and strides.

    Attributes:
        keys: Keys of the first layer, ``[pages, kv_heads, page_tokens, head_dim]``, with any strides.
        values: Values of the first layer, likewise.
        offsets: ``[layers]``, int64, on the device: distance of each layer's keys and values from the first layer's, in
            numbers.
    """

    keys: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, caches: Sequence[LayerKV]) -> Layers | None:
        """Describe the layers' ``caches``; return None unless they are alike and a multiple of 16 numbers apart."""
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
    """Write the tokens of several layers, with rotated keys, in one launch.

    Args:
        memory: Memory that ``staged`` describes, on the cache's device: ``[elements]`` in the cache's dtype, or
            ``[bytes]``, uint8, in rows (:func:`~cacheblend_rag.store.codec.coded`).
        staged: Place of each token in ``memory``, and its slot.
        move: Rotation of the keys, the same for all these layers; None for no rotation.
        layers: Caches of the layers that ``memory`` holds of each entry.
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
    """Return cos and sin of a move; without a move return ``instead``, which is never read."""
    return (instead, instead) if move is None else (move.rotation.cos.contiguous(), move.rotation.sin.contiguous())


def _constants(move: Move | None, dim: int) -> dict[str, int | bool]:
    """Return the compile-time constants of both kernels, for heads of ``dim`` and the rotation of a move."""
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
    """Write ``kv``, with rotated keys, at ``slots`` of a cache.

    Args:
        kv: ``[kv_heads, tokens, head_dim]``, on the cache's device and in its dtype, contiguous in the last dimension.
        move: Rotation of the keys; None for no rotation.
        slots: ``[tokens]``, int64: page index times tokens per page, plus the token's index in its page.
        keys: The cache's keys, ``[pages, kv_heads, page_tokens, head_dim]``, with any strides.
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
    """Begin to place ``stored``, without waiting for the end.

    Args:
        stored: Stored KV, as numbers or as rows of the caches' dtype.
        slots: ``[tokens]``, int64, on the device: slots of the tokens in a cache.
        layers: Caches of all layers.
        transfer: Transfer to the caches' device.
        arrivals: Events that are recorded when groups of layers have been placed.
        memory: Tensors of the caches, if they may be freed before the end.
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
    from_keys, from_values, cos, sin, slots, keys, values, tokens, first,
    from_keys_head, from_keys_token, from_values_head, from_values_token,
    keys_page, keys_head, keys_token, keys_dim, values_page, values_head, values_token, values_dim,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Place ``TOKENS`` tokens of one head; ``*_UP`` are widths rounded up to powers of 2, as Triton requires."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = (token < tokens)[:, None]
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    if PAGE > 0:
        page, row = slot // PAGE, slot % PAGE
    else:  # a single page: its length need not be a compile-time constant
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
    memory, scales, before, within, length, slots, cos, sin, keys, values, offsets, tokens, first,
    keys_page, keys_head, keys_token, keys_dim, values_page, values_head, values_token, values_dim,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    HALF: tl.constexpr, HALF_UP: tl.constexpr, REST_UP: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Place ``TOKENS`` tokens of one head and layer; rows end with a scale of ``SCALE`` bytes if ``SCALE`` is not 0."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    there = token < tokens
    slot = tl.load(slots + token, mask=there, other=0)
    rows = tl.load(length + token, mask=there, other=0)
    ahead = tl.load(before + token, mask=there, other=0) * tl.num_programs(2) + layer * rows  # rows of one head
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
    offset = tl.multiple_of(tl.load(offsets + layer), 16)  # lets one instruction write several numbers
    keys += (offset + page * keys_page + head * keys_head + row * keys_token)[:, None]
    values += (offset + page * values_page + head * values_head + row * values_token)[:, None]
    _move(
        from_keys, from_values, keys_by, values_by, cos, sin, keys, values, token, there[:, None], first, keys_dim, values_dim,
        SCALE > 0, DIM, DIM_UP, HALF, HALF_UP, REST_UP, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _load(at, by, mask, CODED: tl.constexpr):
    """Load numbers; ``CODED`` numbers are integers to multiply by ``by``, a power of 2, so that nothing is rounded."""
    found = tl.load(at, mask=mask)
    if CODED:
        found = (found.to(tl.float32) * by.to(tl.float32)).to(by.dtype)
    return found


@triton.jit
def _move(
    from_keys, from_values, keys_by, values_by, cos, sin, keys, values, token, real, first, keys_dim, values_dim,
    CODED: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr,
    REST_UP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Copy the values and rotate the keys of the ``real`` tokens; pointers are per token, ``[tokens, 1]``."""
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
        # Tokens before ``first`` are copied unchanged.
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
