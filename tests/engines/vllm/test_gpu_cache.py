"""Tests of the paged cache in every layout of vLLM's GPU backends, and of a pass's metadata as the backends read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from cacheblend_rag.blending.rope import Move, Rotation, moved
from cacheblend_rag.engines.vllm.attention import Scattered
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.store.kv import LayerKV
from tests.engines.kernels.interpreter import interpret
from tests.engines.kernels.test_attention import dense
from tests.engines.vllm.gpu_cache import BACKENDS, BLOCK, DIM, HEADS, KV_HEADS, LAYOUTS, NAMES, described, paged_model

TABLE = (7, 3, 9, 1)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def random_kv(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> LayerKV:
    k, v = torch.randn(2, KV_HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))
    return LayerKV(k.to(dtype), v.to(dtype))


def equal(a: LayerKV, b: LayerKV) -> bool:
    return torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def test_the_backends_allow_both_orders_of_heads_and_tokens() -> None:
    strides = {layout.layer_view_order for layout in LAYOUTS}
    assert {(0, 2, 1, 3), (0, 1, 2, 3)} <= strides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kv_written_by_a_backend_is_read_back_from_its_layer(
    monkeypatch: pytest.MonkeyPatch, layout: Any, backend: str, dtype: torch.dtype
) -> None:
    model = paged_model(monkeypatch, backend, layout, dtype)
    assert model.kernel_block_size == BLOCK
    slots = model.slots(0, [TABLE], torch.tensor([0, 5, 15, 16, 40, 41, 63]))
    want = [random_kv(len(slots), layer, dtype) for layer in range(len(NAMES))]
    for layer, kv in enumerate(want):
        model.write(layer, kv, slots)
    assert all(equal(model.read(layer, slots), kv) for layer, kv in enumerate(want))
    assert model.layout_is_known()


def test_an_unknown_layout_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged_model(monkeypatch, "FLASH_ATTN", LAYOUTS[0])
    model._pages[1] = LayerKV(*reversed(model._pages[1]))
    assert not model.layout_is_known()


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 3, HEADS)], ids=["plain", "sinks"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_kernels_place_and_attend_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, layout: Any, sinks: torch.Tensor | None
) -> None:
    model = paged_model(monkeypatch, "FLASH_ATTN", layout, sinks=sinks)
    kernels = model.find_kernels()
    assert kernels is not None
    positions = torch.arange(60)
    slots = model.slots(0, [TABLE], positions)
    angles = torch.randn(50, DIM // 2, generator=torch.Generator().manual_seed(5))
    move = Move(Rotation(angles.cos(), angles.sin()), "half", 10)
    layers = [random_kv(60, layer) for layer in range(len(NAMES))]
    for layer, kv in enumerate(layers):
        kernels.place(layer, kv, move, slots)
    asked = torch.tensor([0, 3, 4, 31, 32, 59])
    query = torch.randn(len(asked), HEADS, DIM, generator=torch.Generator().manual_seed(6))
    metadata = Scattered(asked, torch.tensor(TABLE, dtype=torch.int32))
    for layer, kv in enumerate(layers):
        assert equal(model.read(layer, slots), moved(kv, move))
        attention, out = model.attention[layer], torch.empty_like(query)
        with kernels.attending():
            attention.impl.forward(
                attention, query, None, None, attention.kv_cache, metadata, output=out, output_scale=None
            )
        want = dense(query, *moved(kv, move), asked, 0.2, sinks=sinks)
        assert (out - want).abs().max() < 1e-5


def test_each_layer_reads_and_writes_the_pages_of_its_group(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    model = paged_model(monkeypatch, "FLASH_ATTN", LAYOUTS[0])
    model.kernels, model.groups, model.group_of = model.find_kernels(), model.groups * 2, [0, 1, 0]
    pages, positions = Pages(model, [TABLE, TABLE[::-1]], 60), torch.tensor([3, 20, 41])
    slots = [pages.at(group, positions) for group in range(2)]
    with model._attention_at(positions, positions, pages, slots) as metadata:
        tables = [metadata[name].table.tolist() for name in NAMES]
    assert tables == [list(TABLE), list(TABLE[::-1]), list(TABLE)]
    assert [x.tolist() for x in model._of_layers(slots).values()] == [[115, 52, 153], [19, 148, 57], [115, 52, 153]]


def test_vllms_attention_is_restored_after_a_failed_pass(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    model = paged_model(monkeypatch, "TRITON_ATTN", LAYOUTS[0])
    kernels = model.find_kernels()
    own = [layer.impl.forward for layer in model.attention]
    with pytest.raises(RuntimeError), kernels.attending():
        assert all(layer.impl.forward != before for layer, before in zip(model.attention, own, strict=True))
        raise RuntimeError
    assert [layer.impl.forward for layer in model.attention] == own


@pytest.mark.parametrize("impl", [{"alibi_slopes": [1.0]}, {"chunk_lookback": 1}])
def test_vllms_attention_is_used_for_features_that_the_kernel_does_not_have(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, impl: dict[str, Any]
) -> None:
    model = paged_model(monkeypatch, "TRITON_ATTN", LAYOUTS[0], **impl)
    assert model.find_kernels() is None


def test_segments_are_limited_by_runs_only_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, interpreted: None
) -> None:
    model = paged_model(monkeypatch, "FLASH_ATTN", LAYOUTS[0])
    scattered = torch.arange(0, 100, 2)
    assert len(model.segment(scattered)) == 4
    model.kernels = model.find_kernels()
    assert len(model.segment(scattered)) == 50
    assert len(model.segment(torch.arange(100))) == 64


def runs(model: PagedModel, *bounds: tuple[int, int]) -> Any:
    positions = torch.cat([torch.arange(*pair) for pair in bounds])
    return described(model, TABLE, positions)


def test_vllm_counts_single_tokens_before_the_first_longer_run_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary is where vLLM's backends split: every run before it has one token, and no token is lost."""
    model = paged_model(monkeypatch, "FLASH_ATTN", LAYOUTS[0])
    mixed = runs(model, (2, 3), (5, 6), (8, 12), (20, 21), (40, 45))
    assert split_decodes_and_prefills(mixed) == (2, 3, 2, 10)
    assert split_decodes_and_prefills(mixed, treat_short_extends_as_decodes=False) == (0, 5, 0, 12)
    assert split_decodes_and_prefills(runs(model, (8, 12), (20, 21))) == (0, 2, 0, 5)
    assert split_decodes_and_prefills(runs(model, (2, 3), (9, 10))) == (2, 0, 2, 0)
    assert mixed.seq_lens.tolist() == [3, 6, 12, 21, 45]
    assert mixed.query_start_loc.tolist() == [0, 1, 2, 6, 7, 12]
