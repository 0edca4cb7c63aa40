"""Tests that the kernel that rotates and places stored KV equals torch's rotation and copy, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.blending.rope import Move, Rotation, moved
from cacheblend_rag.store.codec import coded, numbers
from cacheblend_rag.store.kv import ChunkKV, LayerKV
from tests.engines.kernels.pages import ORDERS, columns_first, paged_cache

HEADS, TOKENS, SIZE, PAGES = 2, 77, 16, 8


def stored(dim: int, dtype: torch.dtype, seed: int = 0) -> LayerKV:
    k, v = torch.randn(2, HEADS, TOKENS, dim, generator=torch.Generator().manual_seed(seed))
    return LayerKV(k.to(dtype), v.to(dtype))


def rotation(tokens: int, dims: int) -> Rotation:
    angles = torch.arange(tokens)[:, None] * 37 % 512 / 10_000 ** (torch.arange(0, dims, 2) / dims)
    return Rotation(angles.cos(), angles.sin())


def slots() -> torch.Tensor:
    """Return slots that are neither consecutive nor in order."""
    return torch.randperm(PAGES * SIZE, generator=torch.Generator().manual_seed(1))[:TOKENS]


def check(
    device: str, kv: LayerKV, move: Move | None, keys: torch.Tensor, values: torch.Tensor, equal_to: LayerKV
) -> None:
    from cacheblend_rag.engines.kernels.place import place

    on_device = LayerKV(*(x.to(device) for x in kv))
    if move is not None:
        there = Rotation(move.rotation.cos.to(device), move.rotation.sin.to(device))
        move = Move(there, move.layout, move.first)
    place(on_device, move, slots().to(device), keys, values)
    size = keys.shape[2]
    pages, rows = slots() // size, slots() % size
    for cache, want in zip((keys.cpu(), values.cpu()), equal_to, strict=True):
        assert torch.equal(cache[pages, :, rows].transpose(0, 1), want)
        written = torch.zeros(keys.shape[0], size, dtype=torch.bool)
        written[pages, rows] = True
        assert cache.transpose(1, 2)[~written].isnan().all(), "it wrote elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim,rotated", [(32, 32), (24, 24), (32, 12)])
def test_the_placing_kernel_rotates_keys_bit_for_bit_as_torch_does(
    device: str, dtype: torch.dtype, layout: str, dim: int, rotated: int
) -> None:
    first = 9
    kv = stored(dim, dtype)
    move = Move(rotation(TOKENS - first, rotated), layout, first)
    want = moved(kv, move)
    assert torch.equal(want.k[:, :first], kv.k[:, :first])
    assert not torch.equal(want.k[:, first:], kv.k[:, first:])
    check(device, kv, move, *paged_cache("NHD", PAGES, HEADS, SIZE, dim, dtype, device), equal_to=want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", [0, TOKENS, None])
def test_the_placing_kernel_writes_every_memory_order_of_the_cache(device: str, order: str, first: int | None) -> None:
    kv = stored(16, torch.float32)
    move = None if first is None else Move(rotation(TOKENS - first, 16), "half", first)
    cache = paged_cache(order, PAGES, HEADS, SIZE, 16, torch.float32, device)
    check(device, kv, move, *cache, equal_to=moved(kv, move))


def test_the_placing_kernel_writes_keys_column_by_column(device: str) -> None:
    kv, move = stored(16, torch.float32), Move(rotation(TOKENS, 16), "half", 0)
    keys, values = (x.to(device) for x in columns_first(PAGES, HEADS, SIZE, 16))
    check(device, kv, move, keys, values, equal_to=moved(kv, move))


def test_the_placing_kernel_reads_a_part_of_a_larger_block(device: str) -> None:
    whole = stored(16, torch.float32)
    kv = LayerKV(*(torch.stack([x, -x], 1).to(device)[:, 0] for x in whole))
    assert not kv.k.is_contiguous()
    check(device, kv, None, *paged_cache("NHD", PAGES, HEADS, SIZE, 16, torch.float32, device), equal_to=whole)


def test_the_placing_kernel_writes_one_page_of_any_length(device: str) -> None:
    kv, move = stored(16, torch.float32), Move(rotation(TOKENS, 16), "half", 0)
    cache = paged_cache("HND", 1, HEADS, PAGES * SIZE, 16, torch.float32, device)
    check(device, kv, move, *cache, equal_to=moved(kv, move))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved", None])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("in_rows", [True, False])
def test_several_layers_of_several_entries_are_placed_in_one_launch(
    device: str, dtype: torch.dtype, layout: str | None, paged: bool, in_rows: bool
) -> None:
    from cacheblend_rag.engines.kernels.place import Layers, TokenTable, place_layers

    layers, dim, room, first = 3, 24, PAGES * SIZE, 5
    lengths, cuts = (11, 40, 9), ((0, 11), (3, 37), (2, 9))  # stored tokens of each entry, and the tokens wanted of it
    wanted = sum(end - begin for begin, end in cuts)
    generator = torch.Generator().manual_seed(3)
    entries = [torch.randn(layers, 2, HEADS, n, dim, generator=generator).to(dtype) for n in lengths]
    memory = torch.cat([entry.reshape(-1) for entry in entries])
    if in_rows:
        made = [coded(ChunkKV([LayerKV(*layer) for layer in entry], 0)) or [] for entry in entries]
        memory = torch.cat([side.reshape(-1) for rows in made for layer in rows for side in layer])
        entries = [torch.stack([torch.stack(numbers(layer, dtype)) for layer in rows]) for rows in made]
    before = [sum(lengths[:i]) for i in range(3)]
    columns = [(before[i], token, lengths[i]) for i, (a, b) in enumerate(cuts) for token in range(a, b)]
    slots = torch.randperm(room, generator=generator)[:wanted]
    move = None if layout is None else Move(rotation(wanted - first, 16), layout, first)
    there = None
    if move is not None:
        there = Move(Rotation(move.rotation.cos.to(device), move.rotation.sin.to(device)), move.layout, first)
    pages, size = (PAGES, SIZE) if paged else (1, room)
    caches = [LayerKV(*paged_cache("NHD", pages, HEADS, size, dim, dtype, device)) for _ in range(layers)]
    staged = TokenTable(*(column.to(device) for column in torch.tensor(columns).T.contiguous()), slots.to(device))
    where = Layers.of(caches)
    assert where is not None
    place_layers(memory.to(device), staged, there, where)
    for layer in range(layers):
        parts = [LayerKV(e[layer, 0, :, a:b], e[layer, 1, :, a:b]) for e, (a, b) in zip(entries, cuts, strict=True)]
        want = moved(LayerKV(*(torch.cat(side, 1) for side in zip(*parts, strict=True))), move)
        for cache, side in zip(caches[layer], want, strict=True):
            rows = cache.cpu().transpose(1, 2).flatten(0, 1)  # by slot
            assert torch.equal(rows[slots].transpose(0, 1), side)
            rest = torch.ones(room, dtype=torch.bool)
            rest[slots] = False
            assert rows[rest].isnan().all(), "it wrote elsewhere"


def test_caches_of_different_shapes_are_not_placed_in_one_launch(device: str) -> None:
    from cacheblend_rag.engines.kernels.place import Layers

    one, other = (LayerKV(*paged_cache("NHD", PAGES, HEADS, SIZE, dim, torch.float32, device)) for dim in (24, 32))
    assert Layers.of([one, one]) is not None
    assert Layers.of([one, other]) is None
    assert Layers.of([one, LayerKV(one.v, one.k)]) is None
