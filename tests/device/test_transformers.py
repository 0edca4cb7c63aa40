"""Tests that the transformers engine on a device gives the CPU's numbers in gate, precompute, blend, save and load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.store import open_store
from tests.blending import reference
from tests.blending.families import BLENDED, NOT_BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits
from tests.blending.writers import write_writer
from tests.device import simulated

pytestmark = pytest.mark.slow

# One family has windows and one has none; CUDA runs all families, because it is fast.
FAMILIES = sorted(BLENDED) if torch.cuda.is_available() else ["llama", "gemma3"]
ANSWER = SamplingParams(max_tokens=6)


def engine_on(device: str, family: str, scene: Scene, dtype: torch.dtype = torch.float32, **options: object):
    return TransformersEngine(make_model(BLENDED[family](), dtype), device=device, header=scene.header, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_blends_equal_the_reference_on_the_cpu(device: str, family: str) -> None:
    scene = Scene()
    engine = engine_on(device, family, scene)
    assert engine.gate.passed, engine.gate.reason
    engine.precompute(scene.chunks)
    for ratio in (0.0, 0.15, 1.0):
        got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio, "hkvd"))
        want = reference.blend(make_model(BLENDED[family]()), scene.header, scene.parts(), ratio)
        assert recomputed == want.recomputed
        assert (got.cpu() - want.logits).abs().max() < 1e-3


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[TransformersEngine, TransformersEngine]]:
    """Return a cache for tests: by device, an engine on it and one on the CPU with the same chunks."""
    return {}


@pytest.mark.parametrize("policy", ["static-query", "hybrid", "random"])
def test_every_policy_selects_the_tokens_of_the_cpu(device: str, policy: str, pairs) -> None:
    scene = Scene()
    if device not in pairs:
        there = engine_on(device, "llama", scene, ranking="now")
        pairs[device] = there, engine_for(make_model(BLENDED["llama"]()), scene, ranking="now")
        for engine in pairs[device]:
            engine.precompute(scene.chunks)
    found = []
    for engine in pairs[device]:
        logits, recomputed, result = blended_logits(engine, scene, BlendSettings(0.25, policy))
        assert result.policy == policy
        found.append((logits.cpu(), recomputed))
    (got, chosen), (want, expected) = found
    assert chosen == expected
    assert (got - want).abs().max() < 1e-3


def test_a_blend_from_disk_has_the_answer_of_a_blend_from_ram(device: str, tmp_path: Path) -> None:
    scene = Scene(chunk_tokens=(75, 50, 100, 60))
    in_ram = engine_on(device, "llama", scene)
    in_ram.precompute(scene.chunks)
    want = in_ram.generate(scene.prompt, ANSWER, BlendSettings(ratio=0.2))
    on_disk = engine_on(device, "llama", scene, store=open_store(tmp_path, ram_budget=1))
    on_disk.precompute(scene.chunks)
    got = on_disk.generate(scene.prompt, ANSWER, BlendSettings(ratio=0.2))
    assert got.mode == "blend"
    assert got.token_ids == want.token_ids
    assert got.usage == want.usage


def test_each_chunk_is_saved_to_page_locked_memory_by_one_late_copy(sim: str) -> None:
    scene = Scene()
    store = open_store(None, ram_budget=1 << 22)
    engine = engine_on(sim, "llama", scene, store=store)
    before = simulated.SimulatedTensor.late_fetches
    assert engine.precompute(scene.chunks).computed == len(scene.chunks)
    assert simulated.SimulatedTensor.late_fetches - before == len(scene.chunks) + 1  # one more for the header
    for chunk in scene.chunks:
        kv = engine.entries.get(chunk.token_ids, engine.num_layers)
        assert all(kv.layer(index).v.is_pinned() for index in range(engine.num_layers))
    pins, unpinned = simulated.pins[0], simulated.SimulatedTensor.unpinned
    assert engine.generate(scene.prompt, ANSWER, BlendSettings(ratio=0.2)).mode == "blend"
    assert simulated.pins[0] - pins == 1  # the selection reads one number a token
    assert simulated.SimulatedTensor.unpinned - unpinned < 60  # ids, positions, single numbers


def test_entries_stored_on_a_device_serve_a_cpu_and_the_reverse(device: str, tmp_path: Path) -> None:
    scene = Scene()
    answers = []
    for first, second in ((device, "cpu"), ("cpu", device)):
        root = tmp_path / first
        writer = engine_on(first, "qwen3", scene, store=open_store(root), ranking="now")
        writer.precompute(scene.chunks)
        writer.store.close()
        reader = engine_on(second, "qwen3", scene, store=open_store(root))
        done = reader.generate(scene.prompt, ANSWER, BlendSettings(0.3, "static"))
        assert (done.mode, done.policy) == ("blend", "static")
        assert not done.missing
        answers.append(done.token_ids)
    assert answers[0] == answers[1]


def test_a_kv_writer_writes_the_same_kv_on_a_device_and_on_the_cpu(device: str, tmp_path: Path) -> None:
    scene = Scene()
    write_writer(tmp_path, BLENDED["llama"]())
    there, here = (engine_on(where, "llama", scene, writer=tmp_path, ranking="now") for where in (device, "cpu"))
    for engine in (there, here):
        engine.precompute(scene.chunks)
    for chunk in scene.chunks:
        got, want = (each.entries.get(chunk.token_ids, each.num_layers) for each in (there, here))
        assert torch.allclose(got.static_deviation(), want.static_deviation(), rtol=1e-3)
        for layer in range(here.num_layers):
            assert all(
                torch.allclose(a, b, atol=1e-4) for a, b in zip(got.layer(layer), want.layer(layer), strict=True)
            )


def test_a_missing_chunk_is_written_back_from_the_device(device: str) -> None:
    scene = Scene()
    engine = engine_on(device, "llama", scene)
    engine.precompute(scene.chunks[:-1])
    before = engine.generate(scene.prompt, ANSWER, BlendSettings(0.3))
    after = engine.generate(scene.prompt, ANSWER, BlendSettings(0.3))
    assert (len(before.missing), len(after.missing)) == (1, 0)
    kv = engine.entries.get(scene.chunks[-1].token_ids, engine.num_layers)
    assert kv.layer(0).k.device.type == "cpu"


def test_half_precision_passes_the_gate(device: str) -> None:
    engine = engine_on(device, "qwen3", Scene(), torch.bfloat16)
    assert engine.gate.passed, engine.gate.reason


def test_a_model_without_blending_has_the_cpus_answer(device: str) -> None:
    scene = Scene()
    answers = []
    for where in (device, "cpu"):
        with pytest.warns(UserWarning, match="ordinary prefill"):
            engine = TransformersEngine(
                make_model(NOT_BLENDED["learned positions"][0]()), device=where, header=scene.header
            )
        answers.append(engine.generate(scene.prompt, ANSWER).token_ids)
    assert answers[0] == answers[1]
