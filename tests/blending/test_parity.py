"""Compares every family, policy and ratio with the model's own prefill and the independent reference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.engine import planned
from cacheblend_rag.store import open_store
from tests.blending import reference
from tests.blending.families import _BASE, BLENDED, NOT_BLENDED, llama4, make_model
from tests.blending.prompts import Scene, engine_for

pytestmark = pytest.mark.usefixtures("gate_once")
GREEDY = SamplingParams(max_tokens=8)
_models: dict[str, Any] = {}
_engines: dict[str, Any] = {}
_full: dict[str, torch.Tensor] = {}


def model_of(family: str) -> Any:
    if family not in _models:
        _models[family] = make_model(BLENDED[family]())
    return _models[family]


def engine_of(family: str) -> Any:
    """Return an engine with the first scene's chunks; a family's tests share it, since its gate takes longer than a
    blend."""
    if family not in _engines:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _engines[family] = engine_for(model_of(family), Scene())
        _engines[family].precompute(Scene().chunks)
    return _engines[family]


def blended_logits(engine: Any, scene: Any, settings: BlendSettings) -> tuple[torch.Tensor, list[int], Any]:
    """Return the prompt's last logits and the recomputed positions, as the engine computes them."""
    request = engine.request(scene.prompt, SamplingParams(max_tokens=1), settings)
    plan = planned(engine, request)
    from cacheblend_rag.blending.fusor import fuse
    from cacheblend_rag.engines.transformers.target import TransformersTarget

    target = TransformersTarget(engine.runner, engine.rope, scene.prompt.token_ids)
    result = fuse(plan, target, request.options)
    return target.logits, result.recomputed.tolist(), result.outcome


@pytest.mark.parametrize("family", BLENDED)
def test_every_family_passes_the_gate_and_ratio_1_equals_the_full_prefill(family: str) -> None:
    model, scene, engine = model_of(family), Scene(), engine_of(family)
    assert engine.gate.passed, engine.gate.reason
    ids = torch.tensor([scene.prompt.token_ids])
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits[0, -1]
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)[0, ids.shape[1] :].tolist()
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=1.0, policy="hkvd"))
    assert (got - want).abs().max() < 1e-4
    assert len(recomputed) == sum(len(c.token_ids) for c in scene.chunks[1:])
    answer = engine.generate(scene.prompt, GREEDY, BlendSettings(ratio=1.0, policy="hkvd"))
    assert answer.mode == "blend"
    assert list(answer.token_ids) == tokens[: len(answer.token_ids)]
    assert len(answer.token_ids) == 8 or tokens[len(answer.token_ids)] == 2


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("family", BLENDED)
def test_ratios_between_0_and_1_equal_the_independent_reference(family: str, ratio: float) -> None:
    model, scene, engine = model_of(family), Scene(), engine_of(family)
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy="hkvd"))
    want = reference.blend(model, scene.header, scene.parts(), ratio)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4
    if family not in _full:
        _full[family] = reference.blend(model, scene.header, scene.parts(), 1.0).logits
    assert (got - _full[family]).abs().max() > 1e-2, (
        "the scene does not tell blended from full: the test would prove nothing"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("checks", [(2,), (1, 2), (1, 2, 4)])
def test_deeper_check_layers_and_gradual_filtering_equal_the_reference(family: str, checks: tuple[int, ...]) -> None:
    model, scene = model_of(family), Scene(seed=4)
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    widths = engine.profile.resolve(BlendSettings(check_layers=checks), engine.num_layers).widths
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=0.3, policy="hkvd", check_layers=checks))
    want = reference.blend(model, scene.header, scene.parts(), 0.3, checks, widths)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4
    assert list(widths) == sorted(widths, reverse=True)
    assert widths[-1] == 1


def models_own(model: Any, scene: Scene, count: int) -> tuple[int, ...]:
    """Return the model's greedy answer, each token by a forward over all tokens before it."""
    ids = list(scene.prompt.token_ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[-count:])


@pytest.mark.parametrize("piece", [100, 108])
def test_a_prompt_longer_than_a_piece_of_chunked_local_attention_is_prefilled_by_the_model(
    piece: int,
) -> None:
    scene, model = Scene(), make_model(llama4(_BASE, 16, piece))
    want = models_own(model, scene, 12)  # behind 110 tokens the answer, too, stands behind a cut
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=12), BlendSettings(ratio=0.15, policy="hkvd"))
    assert (answer.mode, answer.token_ids) == ("prefill", want)
    assert f"cut after {piece} tokens" in answer.reason


def test_chunked_local_attention_may_cut_an_answer_behind_a_blend() -> None:
    scene = Scene()
    model = make_model(llama4(_BASE, 16, len(scene.prompt.token_ids) + 4))
    want = models_own(model, scene, 12)
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    answer = engine.generate(scene.prompt, SamplingParams(max_tokens=12), BlendSettings(ratio=1.0, policy="hkvd"))
    assert (answer.mode, answer.token_ids) == ("blend", want)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sink_policy_recomputes_the_first_tokens_of_each_stale_chunk(family: str) -> None:
    model, scene = model_of(family), Scene()
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=0.15, policy="sink"))
    spans = scene.prompt.spans[1:]
    each = round(round(0.15 * sum(s.end - s.start for s in spans)) / len(spans))
    assert recomputed == [p for s in spans for p in range(s.start, s.start + each)]
    want = reference.blend(model, scene.header, scene.parts(), 0.15, chosen=recomputed)
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("policy,ratio", [("full-reuse", 0.0), ("full-recompute", 1.0)])
def test_full_reuse_and_full_recompute_equal_ratios_0_and_1(policy: str, ratio: float) -> None:
    model, scene = model_of("llama"), Scene()
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=0.15, policy=policy))
    want = reference.blend(model, scene.header, scene.parts(), ratio)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 2), (0, 1, 2)])
def test_missing_chunks_are_computed_in_place_and_stored_ones_still_reused(
    ratio: float, missing: tuple[int, ...]
) -> None:
    model, scene = model_of("llama"), Scene()
    engine = engine_for(model, scene, write_back=False)
    engine.precompute([c for i, c in enumerate(scene.chunks) if i not in missing])
    got, recomputed, result = blended_logits(engine, scene, BlendSettings(ratio=ratio, policy="hkvd"))
    want = reference.blend(model, scene.header, scene.parts(missing), ratio)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4
    usage = engine.generate(scene.prompt, GREEDY, BlendSettings(ratio=ratio, policy="hkvd")).usage
    stored = sum(len(c.token_ids) for i, c in enumerate(scene.chunks) if i not in missing)
    assert usage.reused_tokens == stored + len(scene.header) - len(recomputed)
    assert usage.computed_tokens == result.usage.computed_tokens == usage.prompt_tokens - usage.reused_tokens


def test_a_prompt_that_does_not_start_with_the_header_blends_all_its_chunks() -> None:
    model, scene = model_of("llama"), Scene()
    other = Scene(seed=9)
    engine = engine_for(model, other)
    engine.precompute(scene.chunks)
    plan = planned(engine, engine.request(scene.prompt, SamplingParams(max_tokens=1)))
    assert not plan.exact
    assert len(plan.stale) == len(scene.chunks)
    parts = scene.parts()
    parts[0].kind, parts[1].kind = "text", "stale"
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=0.2, policy="hkvd"))
    want = reference.blend(model, other.header, parts, 0.2)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("ratio,checks", [(0.0, (1,)), (0.3, (1,)), (0.3, (1, 3)), (1.0, (1,))])
def test_a_prompt_may_end_with_a_chunk(ratio: float, checks: tuple[int, ...]) -> None:
    model, scene = model_of("llama"), Scene(question=0, gap=0)
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    settings = BlendSettings(ratio=ratio, policy="hkvd", check_layers=checks)
    got, recomputed, result = blended_logits(engine, scene, settings)
    widths = engine.profile.resolve(settings, engine.num_layers).widths
    want = reference.blend(model, scene.header, scene.parts(), ratio, checks, widths)
    assert recomputed == want.recomputed
    assert result.usage.computed_tokens == len(recomputed) + 1
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_gate_and_stays_near_its_own_full_prefill(dtype: torch.dtype) -> None:
    model, scene = make_model(BLENDED["qwen3"](), dtype), Scene()
    engine = engine_for(model, scene)
    assert engine.gate.passed, engine.gate.reason
    engine.precompute(scene.chunks)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([scene.prompt.token_ids]), use_cache=False).logits[0, -1].float()
    got, _, _ = blended_logits(engine, scene, BlendSettings(ratio=1.0, policy="hkvd"))
    assert (got.float() - want).abs().max() < 0.2 * want.std()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_an_mla_token_is_stored_as_its_latent_and_one_rotary_key(family: str) -> None:
    model, scene = model_of(family), Scene()
    engine = engine_for(model, scene)
    engine.precompute(scene.chunks)
    tokens = len(scene.chunks[1].token_ids)
    kv = engine.entries.get(scene.chunks[1].token_ids, engine.num_layers)
    assert {kv.layer(i).k.shape for i in range(kv.num_layers)} == {(1, tokens, model.config.qk_rope_head_dim)}
    assert {kv.layer(i).v.shape for i in range(kv.num_layers)} == {(1, tokens, model.config.kv_lora_rank)}


def test_alibi_by_distance_alone_is_blended_and_ratio_1_equals_the_full_prefill() -> None:
    scene = Scene()
    model = make_model(transformers.MptConfig(vocab_size=300, d_model=64, n_heads=4, n_layers=5, max_seq_len=4096))
    engine = engine_for(model, scene)
    assert engine.gate.passed, engine.gate.reason
    engine.precompute(scene.chunks)
    got, _, _ = blended_logits(engine, scene, BlendSettings(ratio=1.0, policy="hkvd"))
    with torch.no_grad():
        want = model(input_ids=torch.tensor([scene.prompt.token_ids]), use_cache=False).logits[0, -1]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_BLENDED)
def test_an_unsupported_model_is_served_by_ordinary_prefill_with_one_warning(name: str) -> None:
    config, reason = NOT_BLENDED[name]
    model, scene = make_model(config()), Scene()
    with pytest.warns(UserWarning, match=reason) as caught:
        engine = engine_for(model, scene)
        engine.precompute(scene.chunks)
        answer = engine.generate(scene.prompt, GREEDY)
    assert len([w for w in caught if w.category is UserWarning]) == 1
    assert answer.mode == "prefill"
    assert reason in answer.reason
    assert answer.usage.reused_tokens == 0
    ids = torch.tensor([scene.prompt.token_ids])
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert list(answer.token_ids) == tokens[: len(answer.token_ids)]


@pytest.mark.parametrize("header", [0, 3])
@pytest.mark.parametrize("ratio,checks", [(0.0, (1,)), (0.3, (1,)), (0.3, (3,)), (0.3, (2, 4)), (1.0, (1,))])
def test_kv_read_from_disk_during_computation_gives_the_same_logits(
    tmp_path: Path, header: int, ratio: float, checks: tuple[int, ...]
) -> None:
    model, scene = model_of("gemma3"), Scene(header=header)
    settings = BlendSettings(ratio=ratio, policy="hkvd", check_layers=checks)
    in_ram = engine_for(model, scene)
    on_disk = engine_for(model, scene, store=open_store(tmp_path, ram_budget=1))
    foreign = Scene(seed=5).chunks[
        0
    ]  # a foreign chunk in front: nothing is exact, and layers below the check need no stored KV
    prompts = [scene.prompt]
    moved = Scene(header=header)
    moved.chunks = [foreign, *scene.chunks[1:]]
    prompts.append(moved.prompt)
    for engine in (in_ram, on_disk):
        engine.precompute(scene.chunks)
    for prompt in prompts:
        scene_of = scene if prompt is prompts[0] else moved
        want, chosen, _ = blended_logits(in_ram, scene_of, settings)
        got, chosen_too, result = blended_logits(on_disk, scene_of, settings)
        assert chosen == chosen_too
        assert torch.equal(got, want)
    assert result.load_s > 0 or ratio == 1


@pytest.mark.parametrize("family", ["llama", "yarn_rope", "qwen3", "phi3_partial", "glm"])
def test_a_model_trained_for_independent_chunks_gets_its_block_masked_prefill(family: str) -> None:
    prompt = Scene().prompt
    engine = TransformersEngine(make_model(BLENDED[family]()), device="cpu")
    engine.profile = ModelProfile(ratio=0.0, blockwise=True, origin="declared")
    total = len(prompt.token_ids)
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    for span in prompt.spans:
        sees[span.start : span.end, : span.start] = False
    mask = torch.zeros(1, 1, total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
    plain = make_model(BLENDED[family]())
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor([prompt.token_ids])
        want = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -1].log_softmax(-1)
    for number in range(2):  # nothing is stored at first
        answer = engine.generate(prompt, SamplingParams(max_tokens=1, logprobs=20))
        assert max(abs(want[token].item() - value) for token, value in answer.logprobs[0].top) < 1e-4, number
        assert (answer.mode, answer.missing, answer.calibrated) == ("blend", (), True)
        assert answer.usage.recomputed_tokens == 0
