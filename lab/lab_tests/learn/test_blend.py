"""The differentiable blend of a batch equals the engine's blend of each prompt; gradients equal finite differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_lab.learn.adapter import load_writing_copy, save_writer, weights_of, writing_copy
from cacheblend_lab.learn.blend import BatchBlender, BatchLayout, Lesson, PromptBatch, count_of, deviation, divergence
from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.engine import planned
from cacheblend_rag.engines.transformers.target import TransformersTarget
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, Scored, engine_for
from tests.blending.writers import fingerprint_of

FAMILIES = [family for family in BLENDED if family != "llama4"]  # llama4 cuts attention at fixed places


def batch_of(scenes: list[Scene], exact: int = 0) -> PromptBatch:
    """Make a batch from scenes of one shape; the loss watches the question."""
    spans = tuple((span.start, span.end) for span in scenes[0].prompt.spans)
    ids = torch.tensor([scene.prompt.token_ids for scene in scenes])
    watched = len(scenes[0].question)
    layout = BatchLayout(tuple(scenes[0].header), spans, ids.shape[1], watched, exact)
    return PromptBatch(layout, ids, torch.ones(len(scenes), watched))


def like(scene: Scene, seed: int) -> Scene:
    other = Scene(seed)
    other.header = scene.header
    return other


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_blend_of_a_batch_equals_the_engines_blend(family: str, ratio: float) -> None:
    model = make_model(BLENDED[family]())
    scenes = [Scene(), like(Scene(), 1)]
    engine = engine_for(model, scenes[0])
    batch = batch_of(scenes, exact=1)
    count = count_of(batch.layout, ratio)
    inside = torch.cat([torch.arange(*span) for span in batch.layout.spans[1:]])
    scores = torch.rand(2, len(inside), generator=torch.Generator().manual_seed(0))
    want = []
    for scene, row in zip(scenes, scores, strict=True):
        engine.precompute(scene.chunks)
        plan = make_plan(scene.prompt, scene.header, lambda ids: engine.entries.get(ids, engine.num_layers))
        target = TransformersTarget(engine.runner, engine.rope, scene.prompt.token_ids)
        fuse(plan, target, FuseOptions(Scored(row), ratio) if ratio else FuseOptions(policy("full-reuse"), 0.0))
        assert target.logits is not None
        want.append(target.logits)
    blender = BatchBlender(model)
    _, cache = blender.prefill(batch, keep_kv=True)
    assert cache is not None
    with torch.no_grad():
        stored = blender.behind_exact(batch.layout, cache, blender.write(model, batch))
        placed = torch.zeros(2, len(stored.positions))
        for column, position in enumerate(stored.positions.tolist()):
            at = (inside == position).nonzero().flatten()
            if len(at):
                placed[:, column] = scores[:, at[0]]
        got = blender.blend(batch, stored, placed, [count, count])[:, -1]
    assert (got - torch.stack(want)).abs().max() < 1e-4


def test_prompts_of_a_batch_may_recompute_different_numbers_of_tokens() -> None:
    model = make_model(BLENDED["qwen3"]())
    batch = batch_of([Scene()] * 3)
    blender = BatchBlender(model)
    with torch.no_grad():
        stored = blender.write(model, batch)
        scores = torch.rand(1, len(stored.positions)).expand(3, -1)
        counts = [count_of(batch.layout, ratio) for ratio in (0.0, 0.2, 1.0)]
        together = blender.blend(batch, stored, scores, counts)
        for row, count in enumerate(counts):
            alone = blender.blend(batch, stored, scores, [count] * 3)
            assert (together[row] - alone[row]).abs().max() < 1e-4
        assert (together[2] - blender.prefill(batch)[0][2]).abs().max() < 1e-4, "ratio 1 is the full prefill"


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_the_exact_first_chunk_has_the_models_kv_and_later_chunks_have_the_writers(family: str) -> None:
    model = make_model(BLENDED[family]())
    writing, blender = writing_copy(model, rank=2), BatchBlender(model)
    generator = torch.Generator().manual_seed(0)
    batch = batch_of([Scene(), like(Scene(), 1)], exact=1)
    _, cache = blender.prefill(batch, keep_kv=True)
    assert cache is not None
    with torch.no_grad():
        for tensor in weights_of(writing).values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        joined = blender.behind_exact(batch.layout, cache, blender.write(writing, batch))
        every = batch_of([Scene(), like(Scene(), 1)])
        plain, written = blender.write(model, every), blender.write(writing, every)
    for start, end, want in [(*span, written if number else plain) for number, span in enumerate(batch.layout.spans)]:
        for got, side in zip(joined[:2], want[:2], strict=True):
            mine, theirs = ((each.positions >= start) & (each.positions < end) for each in (joined, want))
            assert all((a[:, :, mine] - b[:, :, theirs]).abs().max() < 1e-4 for a, b in zip(got, side, strict=True))


def test_a_new_writer_writes_the_models_kv_and_leaves_the_model_unchanged() -> None:
    model = make_model(BLENDED["llama"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lesson = Lesson(BatchBlender(model), writing_copy(model, rank=2))
    batch = batch_of([Scene()])
    plain, loss = lesson.loss(batch, plain=True), lesson.loss(batch)
    assert torch.equal(plain, loss)
    assert plain > 1e-3
    loss.backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert list(before) == list(model.state_dict()), "no LoRA is put into the model itself"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_learned_writers_kv_is_blended_as_by_the_engine(family: str, tmp_path: Path) -> None:
    model, scene = make_model(BLENDED[family]()), Scene()
    fingerprint = fingerprint_of(model)
    batch, blender = batch_of([scene], exact=1), BatchBlender(model)
    writing = writing_copy(model, rank=2)
    generator = torch.Generator().manual_seed(0)
    _, cache = blender.prefill(batch, keep_kv=True)
    assert cache is not None

    def blended(by: Any) -> torch.Tensor:
        with torch.no_grad():
            stored = blender.behind_exact(batch.layout, cache, blender.write(by, batch))
            return blender.blend(batch, stored)[0, -1]

    with torch.no_grad():
        for tensor in weights_of(writing).values():
            tensor.copy_((0.2 * torch.randn(tensor.shape, generator=generator)).bfloat16())
    got, plain = blended(writing), blended(model)
    save_writer(writing, tmp_path, fingerprint, {})
    read = blended(load_writing_copy(model, tmp_path))
    engine = engine_for(model, scene, writer=tmp_path)
    engine.precompute(scene.chunks)
    request = engine.request(scene.prompt, SamplingParams(max_tokens=1), BlendSettings(ratio=0.0))
    target = TransformersTarget(engine.runner, engine.rope, scene.prompt.token_ids)
    fuse(planned(engine, request), target, request.options)
    assert target.logits is not None
    assert (got - target.logits).abs().max() < 1e-4
    assert (read - target.logits).abs().max() < 1e-4
    assert (got - plain).abs().max() > 1e-2, "the writer changes nothing: the test would prove nothing"


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "glm"])
def test_gradients_of_the_lesson_equal_finite_differences(family: str, ratio: float) -> None:
    model = make_model(BLENDED[family]()).double()
    writing = writing_copy(model, rank=2)
    lesson = Lesson(BatchBlender(model), writing)
    batch = batch_of([Scene(), like(Scene(), 1)])
    weights = weights_of(writing)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in weights.values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))

    def loss() -> torch.Tensor:
        return chosen_loss(lesson, batch, ratio)

    torch.autograd.backward(loss())
    direction = {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in weights.items()}
    slope = sum(float((direction[name] * t.grad).sum()) for name, t in weights.items() if t.grad is not None)
    step, found = 1e-3, []  # loss and rotation are computed in fp32
    for sign in (1, -1):
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.add_(direction[name], alpha=sign * step)
            found.append(float(loss()))
            for name, tensor in weights.items():
                tensor.sub_(direction[name], alpha=sign * step)
    assert slope == pytest.approx((found[0] - found[1]) / (2 * step), rel=5e-3)
    assert abs(slope) > 1e-4, "the scene does not move the loss: the test would prove nothing"


def chosen_loss(lesson: Lesson, batch: PromptBatch, ratio: float) -> torch.Tensor:
    """Compute the lesson's loss with a choice that does not depend on the writer, so that it is smooth."""
    teacher, _ = lesson.blender.prefill(batch)
    stored = lesson.blender.write(lesson.writing, batch)
    scores = torch.rand(len(batch.ids), len(stored.positions), generator=torch.Generator().manual_seed(1))
    counts = [count_of(batch.layout, ratio)] * len(batch.ids)
    return divergence(teacher, lesson.blender.blend(batch, stored, scores, counts), batch.weights)


def test_exact_kv_does_not_deviate_and_stale_kv_does() -> None:
    model = make_model(BLENDED["llama"]())
    batch, blender = batch_of([Scene()]), BatchBlender(make_model(BLENDED["llama"]()))
    _, cache = blender.prefill(batch, keep_kv=True)
    with torch.no_grad():
        stored = blender.write(model, batch)
    found: Any = deviation(stored, blender.in_context(cache, stored.positions), batch.layout.stale)[0]
    first = stored.positions < batch.layout.spans[0][1]
    later = (stored.positions > batch.layout.spans[0][1]) & (stored.positions < batch.layout.length)
    assert found[first].max() < 1e-6, "behind the header alone a chunk is exact"
    assert found[later].min() > 1e-6
