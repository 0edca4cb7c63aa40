"""Tests `static` and `static-query`: ranked at indexing, equal to an independent reference, and safe without a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.static import probe_ids, static_deviation
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.precompute import plan_precompute
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.store import DiskStore, MemoryStore
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint
from tests.blending import reference
from tests.blending.families import BLENDED
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits, model_of
from tests.conftest import tokenizer_named

pytestmark = pytest.mark.usefixtures("gate_once")
RATIOS = (0.05, 0.3)


WATCHED = set(BLENDED) - {"gemma2", "gpt_oss"}
"""Families whose attention the transformers engine can watch, which excludes families with eager attention."""


def ranking_engine(model: Any, scene: Scene, **options: Any) -> Any:
    """Make an engine with a window just large enough, so that the probe is short."""
    engine = engine_for(model, scene, **{"ranking": "now", **options})
    engine.context_window = 2 * len(scene.prompt.token_ids)
    return engine


def probe_of(engine: Any) -> list[int]:
    return list(probe_ids(engine.tokenizer, engine.subject().vocab_size, engine.context_window))


def reference_scores(model: Any, engine: Any, scene: Scene) -> tuple[list[int], list[torch.Tensor]]:
    """Return the positions of the stale tokens, and each chunk's static deviation; the first chunk is not stale."""
    positions = [at for span in scene.prompt.spans[1:] for at in range(span.start, span.end)]
    probe = probe_of(engine)
    scores = [reference.static_deviation(model, scene.header, probe, list(chunk.token_ids)) for chunk in scene.chunks]
    return positions, scores


def top(positions: list[int], scores: torch.Tensor, ratio: float) -> list[int]:
    order = sorted(range(len(positions)), key=lambda i: (-float(scores[i]), i))
    return sorted(positions[i] for i in order[: round(ratio * len(positions))])


def test_static_deviation_is_the_squared_kv_distance_over_each_layers_mean_square() -> None:
    """Compute the definition token by token: leave out layer 0, and compare keys at their positions behind the probe."""

    def table(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = at[:, None].float() * torch.tensor([1.0, 0.1]).repeat(2)
        return angles.cos(), angles.sin()

    layers, heads, tokens, dim, start, behind = 4, 2, 5, 4, 3, 40
    drawn = torch.Generator().manual_seed(0)
    alone, fresh = (
        [LayerKV(*(torch.randn(heads, tokens, dim, generator=drawn) * (1 + n) for _ in "kv")) for n in range(layers)]
        for _ in "ab"
    )
    rope = Rope([table], [0] * layers, ["half"] * layers)
    at = torch.arange(tokens)
    rotations = rope.rotations(at + start, at + behind)
    want = torch.zeros(tokens)
    for layer in range(1, layers):
        pairs = (fresh[layer].k, rope.rotate(layer, alone[layer].k, rotations)), (fresh[layer].v, alone[layer].v)
        for token in range(tokens):
            for new, old in pairs:
                want[token] += (new[:, token] - old[:, token]).square().sum() / new.square().mean() / (layers - 1)
    got = static_deviation(ChunkKV(alone, start), fresh, behind, rope)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("family", BLENDED)
def test_both_policies_equal_the_independent_reference_on_every_family(family: str) -> None:
    model, scene = model_of(family), Scene()
    engine = ranking_engine(model, scene)
    engine.precompute(scene.chunks)
    positions, each = reference_scores(model, engine, scene)
    static = torch.cat(each[1:])
    for chunk, want in zip(scene.chunks, each, strict=True):
        got = engine.entries.get(chunk.token_ids, engine.num_layers).static_deviation()
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-4)
    attention = reference.question_attention(model, scene.header, scene.parts())[positions]
    policies = {"static": static, "static-query": static.sqrt() * attention}
    if family not in WATCHED:
        del policies["static-query"]
    for policy, scores in policies.items():
        for ratio in RATIOS:
            chosen = top(positions, scores, ratio)
            got, recomputed, result = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy=policy))
            want = reference.blend(model, scene.header, scene.parts(), ratio, chosen=chosen)
            assert (recomputed, result.policy) == (chosen, policy)
            assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["static", "static-query"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_ratios_0_and_1_of_static_policies_equal_full_reuse_and_the_full_prefill(policy: str, ratio: float) -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene)
    engine.precompute(scene.chunks)
    got, _, _ = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy=policy))
    want = reference.blend(model, scene.header, scene.parts(), ratio)
    assert (got - want.logits).abs().max() < 1e-4


def test_static_computes_only_the_tokens_it_recomputes() -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene)
    engine.precompute(scene.chunks)
    ran: list[int] = []
    scatter = engine.runner.scatter
    engine.runner.scatter = lambda ids, *rest: ran.append(len(ids)) or scatter(ids, *rest)
    usage = engine.generate(scene.prompt, SamplingParams(max_tokens=1), BlendSettings(0.1, "static")).usage
    assert ran == [usage.computed_tokens]


@pytest.mark.parametrize("damage", ["never measured", "damaged"])
def test_hkvd_replaces_static_for_unranked_chunks_and_they_are_ranked_afterwards(damage: str, tmp_path: Path) -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene, ranking="lazy", store=DiskStore(tmp_path))
    engine.precompute(scene.chunks)
    if damage == "damaged":
        for chunk in scene.chunks:
            kv = engine.entries.get(chunk.token_ids, engine.num_layers)
            whole = ChunkKV([kv.layer(i) for i in range(kv.num_layers)], kv.start, static=torch.ones(kv.num_tokens))
            engine.entries.put(chunk.token_ids, whole, replace=True)
        _damage_static(tmp_path)
    wanted = BlendSettings(0.3, "static")
    first, recomputed, result = blended_logits(engine, scene, wanted)
    # hkvd takes as many more tokens as it needs for the same quality.
    hkvd, same, _ = blended_logits(engine, scene, BlendSettings(0.6, "hkvd"))
    assert (recomputed, result.policy) == (same, "hkvd")
    assert torch.equal(first, hkvd)
    assert "static fell back to hkvd 0.6, since not all chunks are ranked" in result.reason
    before = engine.generate(scene.prompt, SamplingParams(max_tokens=2), wanted)
    after = engine.generate(scene.prompt, SamplingParams(max_tokens=2), wanted)
    assert (before.policy, after.policy, after.ratio) == ("hkvd", "static", 0.3)
    assert "fell back" not in after.reason
    assert before.mode == after.mode == "blend"
    assert after.missing == ()


def _damage_static(root: Path) -> None:
    """Flip a bit of every static deviation, which is all ones."""
    ones, damaged = torch.ones(1).numpy().tobytes() * 8, 0
    for file in root.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        if (at := data.rfind(ones)) >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            damaged += 1
    assert damaged == 4


def test_precompute_adds_missing_ranks_to_older_entries_once(tmp_path: Path) -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene, ranking="off", store=DiskStore(tmp_path))
    engine.precompute(scene.chunks)
    assert not any(engine.entries.has_static(chunk.token_ids) for chunk in scene.chunks)
    used = engine.store.stats().nbytes
    engine.close()
    engine = ranking_engine(model, scene, store=DiskStore(tmp_path))
    report = engine.precompute(scene.chunks)
    assert (report.computed, report.present) == (0, len(scene.chunks))
    assert all(engine.entries.has_static(chunk.token_ids) for chunk in scene.chunks)
    stored = engine.store.stats()
    assert stored.entries == len(scene.chunks) + 1
    assert used < stored.nbytes < 2 * used
    engine.runner.append = None  # nothing further is computed
    assert engine.precompute(scene.chunks).present == len(scene.chunks)


def test_an_unknown_ranking_time_is_refused() -> None:
    with pytest.raises(InputError, match="ranking is 'never'; give 'now', 'lazy', 'off'"):
        ranking_engine(model_of("llama"), Scene(), ranking="never")


def test_a_chunk_too_long_for_the_probe_is_stored_and_blended_without_a_rank() -> None:
    model, scene = model_of("llama"), Scene(chunk_tokens=(8, 120, 8))
    engine = ranking_engine(model, scene)
    engine.context_window = len(scene.prompt.token_ids) + 8
    room = engine.context_window - len(scene.header) - len(probe_of(engine))
    assert any(len(chunk.token_ids) > room for chunk in scene.chunks), (
        "nothing is too long: the test would prove nothing"
    )
    assert engine.precompute(scene.chunks).failed == {}
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=2), BlendSettings(0.2, "static"))
    assert (answer.mode, answer.policy) == ("blend", "hkvd")


def test_a_chunk_is_ranked_only_if_the_probe_and_the_chunk_leave_room_for_an_answer() -> None:
    scene, window, probe = Scene(chunk_tokens=(20, 21)), 64, 40
    for chunk, ranked in zip(scene.chunks, (True, False), strict=True):
        tokens = len(scene.header) + probe + len(chunk.token_ids)
        assert (tokens < window) == ranked
        entries = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), scene.header)
        plan = plan_precompute([chunk], entries, window, probe_tokens=probe)
        assert (plan.failed, len(chunk.token_ids) <= plan.most_ranked) == ({}, ranked)


def test_the_probe_is_readable_text_and_leaves_room_for_chunks() -> None:
    tokenizer = tokenizer_named("byte_level")
    probe = probe_ids(tokenizer, 300, 4096)
    assert len(probe) == 512
    assert tokenizer.decode(probe).startswith("The museum keeps its oldest maps")
    assert len(probe_ids(tokenizer, 300, 200)) == 50
    assert probe_ids(None, 300, 400) == probe_ids(None, 300, 400)
