"""Tests that in a blend the host waits for the device once for each selection, and never otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.fusor import fuse, fuse_stepwise
from cacheblend_rag.blending.gate import cut
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject, TransformersTarget
from cacheblend_rag.store.kv import ChunkKV, LayerKV
from tests.blending.families import BLENDED, make_model
from tests.device.simulated import SimulatedTensor

pytestmark = pytest.mark.device
LAYERS, HEADS, DIM, CHUNK = 4, 2, 8, 40


@contextmanager
def waits() -> Iterator[Callable[[], int]]:
    before = SimulatedTensor.waits
    yield lambda: SimulatedTensor.waits - before


class Target:
    """A model on the device that computes no real values."""

    num_layers = LAYERS
    rope = Rope([], [0] * LAYERS, ["none"] * LAYERS)
    shows_attention = True

    def __init__(self, device: str):
        self.device = torch.device(device)
        self.ran: list[list[int]] = []

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, *_: Any) -> None:
        assert kv.k.device.type == positions.device.type == self.device.type

    def forward(self, positions: torch.Tensor, before_layer: Any, stop_layer: int | None = None) -> LayerKV | None:
        assert positions.device.type == "cpu"
        for layer in range(LAYERS if stop_layer is None else stop_layer + 1):
            before_layer(layer)
        self.ran.append(positions.tolist())
        shape = (HEADS, len(positions), DIM)
        return None if stop_layer is None else LayerKV(*(torch.ones(shape, device=self.device) for _ in range(2)))

    def attention(self, watch_from: int, before_layer: Any) -> Any:
        def run(positions: torch.Tensor) -> None:
            self.forward(positions, before_layer)

        return SimpleNamespace(run=run, mean=lambda: torch.rand(2 * CHUNK + 6).to(self.device, non_blocking=True))

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        return positions[:most]

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        return deviation

    def agree(self, ok: bool) -> bool:
        return ok


def plan(chunk: int = CHUNK) -> BlendPlan:
    generator = torch.Generator().manual_seed(0)

    def kv() -> ChunkKV:
        layers = [LayerKV(*(torch.rand(HEADS, chunk, DIM, generator=generator) for _ in "kv")) for _ in range(LAYERS)]
        return ChunkKV(layers, 0, static=torch.rand(chunk, generator=generator))

    spans = (StoredSpan(0, chunk, kv()), StoredSpan(chunk + 2, 2 * chunk + 2, kv()))
    return BlendPlan(2 * chunk + 6, (), spans, "")


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("static", (1,), 0),
        ("sink", (1,), 0),
        ("full-reuse", (1,), 0),
        ("hkvd", (1,), 1),
        ("hkvd", (1, 2, 3), 3),
        ("query", (1,), 1),
        ("static-query", (1,), 1),
        ("hybrid", (1, 2), 3),
    ],
)
def test_the_host_waits_once_for_each_selection(sim: str, name: str, layers: tuple[int, ...], expected: int) -> None:
    target = Target(sim)
    with waits() as count:
        widths = tuple(3.0 - i for i in range(len(layers)))
        done = fuse(plan(), target, FuseOptions(policy(name), 0.25, layers, widths))
    assert count() == expected
    assert done.outcome.usage.computed_tokens == len(target.ran[-1])


def test_a_blend_yields_before_its_first_wait(sim: str) -> None:
    target = Target(sim)
    steps = fuse_stepwise(plan(), target, FuseOptions(policy("hkvd"), 0.25))
    with waits() as count:
        assert [next(steps).kind, next(steps).kind] == ["dense", "fetch"]
        assert count() == 0
        assert next(steps).kind == "sparse"
        assert count() == 1


@pytest.mark.parametrize(("name", "most"), [("static", 80), ("hkvd", 80)])
def test_the_number_of_launches_does_not_grow_with_the_prompt(sim: str, name: str, most: int) -> None:
    counts = []
    for chunk in (40, 160):
        before = SimulatedTensor.launches
        fuse(plan(chunk), Target(sim), FuseOptions(policy(name), 0.25))
        counts.append(SimulatedTensor.launches - before)
    assert counts[0] == counts[1] <= most


def test_positions_of_any_number_of_chunks_are_sent_at_once(sim: str) -> None:
    counts = []
    for chunks in (2, 12):
        layer = LayerKV(*(torch.rand(HEADS, CHUNK, DIM).pin_memory() for _ in "kv"))
        kv = ChunkKV([layer] * LAYERS, 0)
        spans = [StoredSpan(i * CHUNK, (i + 1) * CHUNK, kv) for i in range(chunks)]
        before = SimulatedTensor.launches, SimulatedTensor.copies
        with LayerLoader((), spans, Target.rope, LAYERS, torch.device(sim)) as loader:
            counts.append((SimulatedTensor.launches - before[0], SimulatedTensor.copies - before[1]))
            placed = loader.layer(0)
        assert placed is not None
        assert placed.positions.tolist() == list(range(chunks * CHUNK))
    assert counts[0] == counts[1]


def test_a_segment_has_no_more_tokens_than_allowed(sim: str) -> None:
    target = Target(sim)
    steps = fuse_stepwise(plan(), target, FuseOptions(policy("hkvd"), 0.25))
    ahead, seen = next(steps), []
    with pytest.raises(StopIteration):
        while True:
            before = ahead
            ahead = steps.send(30)
            seen.append((before.kind, before.done))
    assert seen[:4] == [("dense", 30), ("dense", 30), ("dense", 22), ("fetch", 0)]
    assert [len(part) for part in target.ran] == [30, 30, 22, 26]


@pytest.mark.parametrize(("name", "expected"), [("static", 0), ("hkvd", 1)])
def test_a_blend_in_a_transformers_model_waits_only_for_its_selection(sim: str, name: str, expected: int) -> None:
    runner = ModelRunner(make_model(BLENDED["llama"]()).to(sim))
    subject, ids = TransformersSubject(runner), list(range(2, 2 + 2 * CHUNK + 6))
    rope = subject.detect_rope()
    kv = ChunkKV(cut(subject.full_prefill(ids[:CHUNK])[1], 0, CHUNK).layers, 0, static=torch.rand(CHUNK))
    spans = (StoredSpan(0, CHUNK, kv), StoredSpan(CHUNK + 2, 2 * CHUNK + 2, kv))
    plan = BlendPlan(len(ids), (), spans, "")
    fuse(
        plan, TransformersTarget(runner, rope, ids), FuseOptions(policy(name), 0.25)
    )  # the first blend of a model builds its tables
    with waits() as count:
        fuse(plan, TransformersTarget(runner, rope, ids), FuseOptions(policy(name), 0.25))
    assert count() == expected


def test_the_host_does_not_wait_for_the_pages_of_a_long_prompt(sim: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    from cacheblend_rag.engines.vllm.pages import PageGroup, Pages

    paged: Any = SimpleNamespace(groups=[PageGroup(16, None)], block_size=16, device=torch.device(sim))
    with waits() as count:
        pages = Pages(paged, [range(1, 1025)], 16_384)
    assert count() == 0
    assert torch.equal(pages.on_device[0].cpu(), torch.arange(16, 16 + 16_384))


def test_a_pass_through_vllms_model_does_not_wait(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    from cacheblend_rag.engines.vllm import paged as module
    from cacheblend_rag.engines.vllm.attention import PassMetadata
    from cacheblend_rag.engines.vllm.paged import PagedModel
    from cacheblend_rag.engines.vllm.pages import PageGroup, Pages

    monkeypatch.setattr(module, "set_forward_context", lambda *_, **__: nullcontext())
    seen: list[Any] = []
    paged: Any = object.__new__(PagedModel)
    paged.device, paged.block_size, paged.config, paged.attention = torch.device(sim), 16, None, []
    paged._max_tokens, paged._max_runs, paged._embeds = 64, 8, False
    builder = SimpleNamespace(build=lambda common_prefix_len, common_attn_metadata: seen.append(common_attn_metadata))
    paged.names, paged.groups, paged.group_of, paged.kernels = ["layer"], [PageGroup(16, None)], [0], None
    paged._metadata = object.__new__(PassMetadata)
    paged._metadata._device, paged._metadata._builders = paged.device, [[(["layer"], builder)]]
    paged.model = lambda input_ids, positions, **_: input_ids
    positions = torch.tensor([3, 4, 5, 9, 20, 21])
    before = SimulatedTensor.launches
    with waits() as count:
        pages = Pages(paged, [range(5, 8)], 40)
        first = paged.segment(positions)
        paged.forward(torch.arange(40)[first], first, pages, lambda _: None)
    assert count() == 0
    assert SimulatedTensor.launches - before <= 12
    (common,) = seen
    assert common.query_start_loc.tolist() == [0, 3, 4, 6]
    assert common.seq_lens.tolist() == [6, 10, 22]
    assert common.block_table_tensor.tolist() == [[5, 6, 7]] * 3
    assert common.slot_mapping.tolist() == [83, 84, 85, 89, 100, 101]
