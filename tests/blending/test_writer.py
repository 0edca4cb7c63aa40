"""Chunks are written by a KV writer: blends equal the reference, which runs on the KV of peft's own model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cacheblend_rag.blending.settings import FULL_REUSE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.engine import planned
from cacheblend_rag.engines.writer import describe
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from tests.blending import reference
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import blended_logits
from tests.blending.writers import fingerprint_of, write_writer

SCENE = Scene()
PARTS = SCENE.parts()  # the KV of a chunk behind the header is the model's own
PROBE = tuple(range(40, 60))


class Written(NamedTuple):
    """An engine with a writer and all chunks stored, its model, and the reference's arguments: the model with the
    writer in it, and the tokens between header and chunk."""

    engine: Any
    model: Any
    how: dict[str, Any]


# A writer changes every linear module, except for experts, which are none in transformers.
TARGETS = {
    "llama": "all-linear",
    "qwen3": "all-linear",
    "gemma3": "all-linear",
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    # kv_b_proj stays out: stored KV is in front of it, the reference's stale KV behind it.
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


@pytest.fixture(scope="module", params=[*TARGETS, *(f"{family} behind the probe" for family in TARGETS)])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gate_once: None
) -> Iterator[Written]:
    family, _, untrained = request.param.partition(" ")
    directory, config = tmp_path_factory.mktemp("writer"), BLENDED[family]
    how: dict[str, Any] = {"behind": PROBE}
    if not untrained:
        how = {"writer": write_writer(directory, config(), target_modules=TARGETS[family])}
    model = make_model(config())
    with engine_for(model, SCENE, writer="probe" if untrained else directory, ranking="now") as engine:
        engine._probe = PROBE
        assert engine.gate.passed, engine.gate.reason
        engine.precompute(SCENE.chunks)
        yield Written(engine, model, how)


def full(model: Any, scene: Scene = SCENE) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([scene.prompt.token_ids]), use_cache=False).logits[0, -1]


def test_ratio_1_with_a_writer_equals_the_models_prefill_without_recomputing_the_first_chunk(
    written: Written,
) -> None:
    got, recomputed, _ = blended_logits(written.engine, SCENE, BlendSettings(ratio=1.0, policy="hkvd"))
    assert (got - full(written.model)).abs().max() < 1e-4
    assert len(recomputed) == sum(len(chunk.token_ids) for chunk in SCENE.chunks[1:])


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
def test_blends_with_a_writer_equal_the_reference_over_peft(written: Written, ratio: float) -> None:
    got, recomputed, _ = blended_logits(written.engine, SCENE, BlendSettings(ratio=ratio, policy="hkvd"))
    want = reference.blend(written.model, SCENE.header, PARTS, ratio, **written.how)
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4
    plain = reference.blend(written.model, SCENE.header, SCENE.parts(), ratio)
    assert (got - plain.logits).abs().max() > 1e-2, "the writer changes too little: the test would prove nothing"


@pytest.mark.parametrize("ratio", [0.15, 0.5])
@pytest.mark.parametrize("policy", ["static", "static-query"])
def test_the_ranking_is_measured_while_the_writer_acts(written: Written, policy: str, ratio: float) -> None:
    got, recomputed, _ = blended_logits(written.engine, SCENE, BlendSettings(ratio=ratio, policy=policy))
    scores = [
        reference.static_deviation(
            written.how.get("writer", written.model),
            SCENE.header,
            [] if "behind" in written.how else list(PROBE),
            list(chunk.token_ids),
            written.how.get("behind", ()),
        )
        for chunk in SCENE.chunks[1:]
    ]
    positions = torch.tensor([at for span in SCENE.prompt.spans[1:] for at in range(span.start, span.end)])
    score = torch.cat(scores)
    if policy == "static-query":
        asked = reference.question_attention(written.model, SCENE.header, PARTS, **written.how)
        score = score.sqrt() * asked[positions]
    chosen = sorted(positions[score.argsort(descending=True)[: round(ratio * len(score))]].tolist())
    assert recomputed == chosen
    want = reference.blend(written.model, SCENE.header, PARTS, ratio, chosen=chosen, **written.how)
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("quality", ["full", "exact"])
def test_requests_without_blending_read_no_kv_of_the_writer(
    written: Written, quality: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    get = Entries.get
    monkeypatch.setattr(Entries, "get", lambda self, *ids, **more: read.append((self, *ids)) or get(self, *ids, **more))
    plan = planned(written.engine, written.engine.request(SCENE.prompt, settings=BlendSettings(quality=quality)))
    assert not plan.stale
    assert all(entries.writer is None for entries, token_ids, *_ in read if token_ids)
    monkeypatch.undo()
    want = written.model.generate(
        torch.tensor([SCENE.prompt.token_ids]), max_new_tokens=6, do_sample=False, use_cache=False
    )
    answer = written.engine.generate(SCENE.prompt, SamplingParams(max_tokens=6), BlendSettings(quality=quality))
    assert list(answer.token_ids) == want[0, len(SCENE.prompt.token_ids) :].tolist()[: len(answer.token_ids)]


def test_the_headers_kv_is_the_models_own_even_if_computed_along_with_chunks(written: Written) -> None:
    kv = written.engine.entries.get((), written.engine.num_layers)
    _, want = written.engine.subject().full_prefill(SCENE.header)
    for got, own in zip((kv.layer(index) for index in range(kv.num_layers)), want.layers, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, own, strict=True))


def test_a_prompts_first_chunk_is_stored_as_the_models_own_kv(written: Written) -> None:
    engine, first, layers = written.engine, SCENE.chunks[0], []
    own = engine.entries.by(None)
    for store in (
        lambda: engine.generate(SCENE.prompt, SamplingParams(max_tokens=3), BlendSettings(ratio=0.3)),
        lambda: engine.precompute_first([first]),
    ):
        engine.store.delete(own.own_key(first.token_ids))
        store()
        kv = own.get(first.token_ids, engine.num_layers)
        assert kv.start == len(SCENE.header)
        layers.append([side.clone() for n in range(engine.num_layers) for side in kv.layer(n)])
    for got, want in zip(*layers, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_model_is_unchanged_after_the_writer_ran(written: Written) -> None:
    assert not any(module._forward_hooks for module in written.model.modules())
    assert torch.equal(full(written.model), full(make_model(written.model.config)))


@pytest.mark.parametrize("settings", [PREFIX_CACHING, FULL_REUSE])
def test_the_first_chunk_of_a_plan_is_the_models_own_kv(written: Written, settings: BlendSettings) -> None:
    engine = written.engine
    plan = planned(engine, engine.request(SCENE.prompt, settings=settings))
    assert [span.chunk for span in plan.exact] == [None, SCENE.chunks[0]]
    _, want = engine.subject().full_prefill([*SCENE.header, *SCENE.chunks[0].token_ids])
    for index, layer in enumerate(want.layers):
        stored = plan.exact[1].layer(index)
        assert all(torch.allclose(a, b[:, 3:], atol=1e-5) for a, b in zip(stored, layer, strict=True))
    if settings is PREFIX_CACHING:
        got, _, _ = blended_logits(engine, SCENE, settings)
        assert (got - full(written.model)).abs().max() < 1e-4


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_the_stored_first_chunk_of_a_prompt_is_as_exact_as_the_header_before_it(tmp_path: Path, codec: str) -> None:
    write_writer(tmp_path, BLENDED["qwen3"]())
    model = make_model(BLENDED["qwen3"]())
    describe(tmp_path, fingerprint_of(model), {})
    store = f"ram://16MiB?codec={codec},file://{tmp_path}/kv"
    with engine_for(model, SCENE, writer=tmp_path, store=store) as engine:
        engine.precompute(SCENE.chunks)
        assert engine.generate(SCENE.prompt, SamplingParams(max_tokens=1), BlendSettings(0.3)).lacking("own_kv")
        disk, key = engine.store.tiers[1], engine.entries.by(None).own_key(SCENE.chunks[0].token_ids)
        engine.flush()
        assert disk.get(key).exact is (codec == "none")


@pytest.mark.parametrize("kind", ["behind other text", "again"])
def test_a_chunk_is_exact_only_as_the_first_behind_the_header(written: Written, kind: str) -> None:
    scene = Scene()
    if kind == "again":
        scene.chunks[2] = scene.chunks[0]
    parts, prompt = scene.parts(), scene.prompt
    if kind == "behind other text":
        parts[1:2] = [reference.Part([7, 8], "text"), reference.Part(parts[1].ids, "stale")]
        ids = (*prompt.token_ids[:3], 7, 8, *prompt.token_ids[3:])
        prompt = TokenizedPrompt(ids, tuple(ChunkSpan(s.chunk, s.start + 2, s.end + 2) for s in prompt.spans))
    want = reference.blend(written.model, scene.header, parts, 0.3, **written.how)
    got, recomputed, _ = blended_logits(written.engine, SimpleNamespace(prompt=prompt), BlendSettings(0.3, "hkvd"))
    assert recomputed == want.recomputed
    assert (got - want.logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_writer_in_half_precision_equals_peft_up_to_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    exact = write_writer(tmp_path, BLENDED["qwen3"]())
    model = make_model(BLENDED["qwen3"](), dtype)
    describe(tmp_path, fingerprint_of(model), {})
    with engine_for(model, SCENE, writer=tmp_path) as engine:
        engine.precompute(SCENE.chunks)
        got, _, _ = blended_logits(engine, SCENE, BlendSettings(ratio=0.0, policy="hkvd"))
    want = reference.blend(make_model(BLENDED["qwen3"]()), SCENE.header, PARTS, 0.0, writer=exact).logits
    assert (got.float() - want).abs().max() < 0.2 * want.std()
