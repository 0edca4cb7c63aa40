"""The eight bugs of public implementations: each check here passes, and fails once the bug is put in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending import fusor as fusor_module
from cacheblend_rag.blending import rope as rope_module
from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import Move, Rope
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.engines import entries as entries_module
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import target as target_module
from cacheblend_rag.engines.transformers.attention import scattered
from cacheblend_rag.engines.transformers.owner import ModelOwner
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.store.kv import ChunkKV, LayerKV, Shard, kv_key
from tests.blending import reference
from tests.blending.families import _BASE, BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits, model_of

broken = pytest.mark.parametrize("bug", [False, True], ids=["right", "with the bug"])


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill unwritten memory with NaN, so that a bug cannot find there the KV of the same blend without the bug."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def fails_if(bug: bool) -> Any:
    return pytest.raises(AssertionError) if bug else nullcontext()


def ready_engine(family: str = "llama", scene: Scene | None = None) -> tuple[Any, Any, Scene]:
    scene = scene or Scene()
    engine = engine_for(model_of(family), scene)
    engine.precompute(scene.chunks)
    return model_of(family), engine, scene


def assert_equals_reference(engine: Any, scene: Scene, ratio: float = 0.3) -> None:
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy="hkvd"))
    want = reference.blend(engine.runner.model, scene.header, scene.parts(), ratio)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4


@broken
def test_1_a_selected_token_attends_to_no_key_behind_its_position(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, scene = ready_engine()

    def bottom_right_aligned(positions: torch.Tensor, *_: Any) -> Any:
        return scattered(torch.arange(len(positions)) + int(positions[-1]) + 1 - len(positions))

    if bug:
        monkeypatch.setattr(target_module, "scattered", bottom_right_aligned)
    with fails_if(bug):
        assert_equals_reference(engine, scene)


@broken
def test_2_the_whole_question_is_recomputed(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, scene = ready_engine()
    forced = fusor_module._forced

    def last_token_only(plan: BlendPlan, candidates: torch.Tensor) -> torch.Tensor:
        gaps = forced(plan, candidates)
        return torch.cat([gaps[gaps < candidates[-1]], gaps[-1:]])

    if bug:
        monkeypatch.setattr(fusor_module, "_forced", last_token_only)
    with fails_if(bug):
        assert_equals_reference(engine, scene)


@broken
def test_3_a_missing_chunk_does_not_lose_the_chunks_behind_it(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    engine = engine_for(model_of("llama"), scene, write_back=False)
    engine.precompute([c for i, c in enumerate(scene.chunks) if i != 1])

    def stop_at_first_miss(prompt: Any, header: Any, lookup: Callable[..., Any], *more: Any, **named: Any) -> BlendPlan:
        lost = False

        def until_missing(ids: Any) -> Any:
            nonlocal lost
            kv = None if lost else lookup(ids)
            lost = lost or kv is None
            return kv

        return make_plan(prompt, header, until_missing, *more, **named)

    if bug:
        monkeypatch.setattr(entries_module, "make_plan", stop_at_first_miss)
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=1), BlendSettings(ratio=0.0, policy="hkvd"))
    with fails_if(bug):
        assert answer.usage.reused_tokens == len(scene.header) + sum(len(scene.chunks[i].token_ids) for i in (0, 2, 3))


@broken
@pytest.mark.parametrize("family", ["llama3_rope", "yarn_rope", "phi3_partial", "gemma3", "glm"])
def test_4_keys_are_moved_by_the_models_own_rope(family: str, bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, scene = ready_engine(family)
    if bug:

        def unscaled(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            dim = 16  # the head dimension of all these models
            angles = positions[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
            angles = torch.cat([angles, angles], -1)
            return angles.cos(), angles.sin()

        layers = engine.runner.num_layers
        engine.rope = Rope([unscaled], [0] * layers, ["half"] * layers)
    with fails_if(bug):
        assert_equals_reference(engine, scene, ratio=0.0)


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@broken
def test_4_bf16_keys_are_rotated_once_in_fp32_and_never_chained(bug: bool) -> None:
    torch.manual_seed(0)
    dims, offset = 64, 32768
    frequencies = 1 / 500000.0 ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims)

    def table(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[:, None].float() * frequencies.float()).repeat(1, 2)
        return angles.cos(), angles.sin()

    def exactly(k: torch.Tensor, by: int) -> torch.Tensor:
        angle = by * frequencies
        rotation = rope_module.Rotation(angle.cos()[None].expand(256, -1), angle.sin()[None].expand(256, -1))
        return rotate64(k.double(), rotation)

    def rotate64(k: torch.Tensor, r: rope_module.Rotation) -> torch.Tensor:
        a, b = k[..., : dims // 2], k[..., dims // 2 :]
        return torch.cat([a * r.cos - b * r.sin, b * r.cos + a * r.sin], -1)

    k = torch.randn(2, 256, dims)
    stored, want = k.bfloat16(), exactly(k, offset)
    rope = Rope([table], [0], ["half"])
    start = torch.arange(256)
    if bug:
        got = stored
        for step in range(8):  # eight moves of one copy take the place of one move of the canonical copy
            here = start + step * offset // 8
            got = rope.rotate(0, got, rope.rotations(here, here + offset // 8))
    else:
        got = rope.rotate(0, stored, rope.rotations(start, start + offset))
    assert got.dtype == torch.bfloat16
    with fails_if(bug):
        assert relative_rms(got, want) < 0.003


@broken
def test_5_the_store_holds_only_kv_computed_behind_the_header(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scene = model_of("llama"), Scene()
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks[:2])
    if bug:

        def from_the_prompt(self: Any, chunks: Any, unranked: Any, known: Any) -> None:
            _, in_context = self.subject().full_prefill(scene.prompt.token_ids)
            for span in scene.prompt.spans:
                if span.chunk in chunks:
                    cut = [
                        LayerKV(x.k[:, span.start : span.end], x.v[:, span.start : span.end]) for x in in_context.layers
                    ]
                    self.entries.put(span.chunk.token_ids, ChunkKV(cut, span.start))

        monkeypatch.setattr(ModelOwner, "write_back", from_the_prompt)
    before = engine.generate(scene.prompt, SamplingParams(max_tokens=4), BlendSettings(ratio=0.15, policy="hkvd"))
    assert set(before.missing) == {c.id for c in scene.chunks[2:]}
    clean = engine_for(model, scene)
    clean.precompute(scene.chunks)
    with fails_if(bug):
        for chunk in scene.chunks:
            got, want = (e.entries.get(chunk.token_ids, 5) for e in (engine, clean))
            assert got is not None
            assert got.start == want.start
            for layer in range(5):
                assert torch.allclose(got.layer(layer).k, want.layer(layer).k, atol=1e-5)
                assert torch.allclose(got.layer(layer).v, want.layer(layer).v, atol=1e-5)


def test_5_blending_leaves_the_stored_kv_unchanged() -> None:
    _, engine, scene = ready_engine()
    keys = [engine.entries.own_key(c.token_ids) for c in scene.chunks]
    before = [[t.clone() for layer in range(5) for t in engine.store.get(key).layer(layer)] for key in keys]
    for ratio in (0.0, 0.3, 1.0):
        engine.generate(scene.prompt, SamplingParams(max_tokens=3), BlendSettings(ratio=ratio, policy="hkvd"))
    after = [[t for layer in range(5) for t in engine.store.get(key).layer(layer)] for key in keys]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


@broken
def test_7_all_tensor_parallel_ranks_choose_the_same_tokens(bug: bool) -> None:
    torch.manual_seed(0)
    layers, heads, dim, chunk = 3, 4, 8, 40
    stale = [LayerKV(torch.randn(heads, chunk, dim), torch.randn(heads, chunk, dim)) for _ in range(layers)]
    fresh = LayerKV(torch.randn(heads, chunk, dim), torch.randn(heads, chunk, dim))
    barrier, sums = threading.Barrier(2), [torch.zeros(chunk)] * 2

    class Rank:
        num_layers, device = layers, torch.device("cpu")
        rope = Rope([], [0] * layers, ["none"] * layers)
        shows_attention = True

        def __init__(self, number: int):
            self.number, self.own, self.ran = number, slice(2 * number, 2 * number + 2), []

        def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
            assert kv.k.shape[0] == 2

        def forward(self, positions: torch.Tensor, before_layer: Any, stop_layer: int | None = None) -> LayerKV | None:
            for layer in range(layers if stop_layer is None else stop_layer + 1):
                before_layer(layer)
            self.ran.append(positions.tolist())
            return None if stop_layer is None else LayerKV(fresh.k[self.own], fresh.v[self.own])

        def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
            return positions

        def agree(self, ok: bool) -> bool:
            return ok

        def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
            if bug:
                return deviation
            sums[self.number] = deviation
            barrier.wait(timeout=600)
            return sums[0] + sums[1]

    ranks = [Rank(0), Rank(1)]

    def run(rank: Rank) -> None:
        shard = ChunkKV([LayerKV(x.k[rank.own], x.v[rank.own]) for x in stale], 0)
        plan = BlendPlan(chunk + 2, (), (StoredSpan(0, chunk, shard),), "")
        fuse(plan, rank, FuseOptions(policy("hkvd"), 0.2))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = fusor_module.kv_deviation(fresh, stale[1]).argsort(descending=True)[:8].sort().values.tolist()
    with fails_if(bug):
        assert ranks[0].ran[-1] == ranks[1].ran[-1] == [*whole, chunk, chunk + 1]


@pytest.mark.parametrize("bug", ["mask", "rotation", "placement", "stop layer"], ids=lambda name: f"wrong {name}")
def test_8_a_model_that_blends_wrongly_fails_the_gate_and_is_served_by_ordinary_prefill(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scene = make_model(hf.LlamaConfig(**_BASE)), Scene()
    if bug == "mask":
        everything = lambda positions, *_: scattered(positions[-1:].expand(len(positions)))  # noqa: E731
        monkeypatch.setattr(target_module, "scattered", everything)
    elif bug == "rotation":
        monkeypatch.setattr(
            Rope, "move", lambda self, i, r, first=0: Move(rope_module.Rotation(r[0].cos, -r[0].sin), "half", first)
        )
    elif bug == "placement":
        from cacheblend_rag.engines.transformers.cache import PositionedCache

        place = PositionedCache.place
        monkeypatch.setattr(
            PositionedCache, "place", lambda self, i, kv, move, at: place(self, i, kv, move, at.flip(0))
        )
    else:
        scatter = ModelRunner.scatter
        late = lambda self, ids, at, cache, before, stop: scatter(  # noqa: E731
            self, ids, at + 1 if stop else at, cache, before, stop
        )
        monkeypatch.setattr(ModelRunner, "scatter", late)
    with pytest.warns(UserWarning, match="ordinary prefill"):
        engine = engine_for(model, scene)
    monkeypatch.undo()
    assert not engine.gate.passed
    engine.precompute(scene.chunks)
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=4))
    assert answer.mode == "prefill"
    assert answer.usage.reused_tokens == 0
    assert "gate" in answer.reason or "standard deviations" in answer.reason


def test_8_the_key_differs_between_models_headers_and_chunks() -> None:
    model, scene = model_of("llama"), Scene()
    engine = engine_for(model, scene)
    other = engine_for(make_model(BLENDED["llama"](), seed=1), scene)
    ids = scene.chunks[0].token_ids
    assert engine.fingerprint == engine_for(model, scene).fingerprint
    keys = {
        kv_key(engine.fingerprint, scene.header, ids),
        kv_key(other.fingerprint, scene.header, ids),
        kv_key(engine.fingerprint, scene.header[:-1], ids),
        kv_key(engine.fingerprint, [*scene.header, ids[0]], ids[1:]),
        kv_key(engine.fingerprint, scene.header, ids[:-1]),
        kv_key(engine.fingerprint, scene.header, ids, Shard(0, 2)),
    }
    assert len(keys) == 6
