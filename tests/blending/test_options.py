"""Tests `ratio="auto"`: it blends at the smallest ratio that leaves out no more deviation than calibration measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from cacheblend_lab.policies import rank_for
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.profile import ModelProfile, load_profile, save_profile
from cacheblend_rag.blending.settings import MOST, BlendSettings, TextRange, TextRatio
from cacheblend_rag.calibrate.ledger import left_out
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import chosen_header_ids
from tests.blending import reference
from tests.blending.prompts import Scene
from tests.blending.test_parity import blended_logits, model_of
from tests.blending.test_static import ranking_engine, reference_scores, top
from tests.conftest import tokenizer_named

SHARES = st.floats(0, 1)
STATIC = st.lists(st.floats(0, 1e3, width=32), min_size=1, max_size=80).map(torch.tensor)


@given(STATIC, SHARES, SHARES)
def test_the_smallest_ratio_within_the_limits_is_chosen(static: Any, least: float, limit: float) -> None:
    ratio = TextRatio(least, limit).choose(static)
    count = round(ratio * len(static))
    assert least <= ratio <= max(least, MOST)
    if least < ratio < MOST:
        assert left_out(static, ratio) <= limit
        assert left_out(static, (count - 1) / len(static)) > limit
    if ratio == least:
        assert least >= MOST or left_out(static, least) <= limit or round(least * len(static)) < len(static)


@given(STATIC, SHARES, SHARES)
def test_the_share_left_out_falls_as_the_ratio_rises(static: Any, one: float, other: float) -> None:
    assert left_out(static, min(one, other)) >= left_out(static, max(one, other))
    assert left_out(static, 1.0) == 0


def test_concentrated_deviation_needs_fewer_tokens_than_spread_deviation() -> None:
    rule = TextRatio(0.05, 0.4)
    concentrated = torch.cat([torch.full((5,), 100.0), torch.ones(95)])
    assert rule.choose(concentrated) == 0.05
    assert rule.choose(torch.ones(100)) == 0.6
    assert rule.choose(torch.zeros(100)) == 0.05


@pytest.mark.parametrize("values", [(1.5, 0.1), (0.1, "0.3"), (0.1, -1)])
def test_limits_outside_0_to_1_are_refused(values: Any) -> None:
    with pytest.raises(InputError):
        TextRatio(*values)


def test_auto_is_refused_without_a_text_range_and_the_error_names_the_command() -> None:
    with pytest.raises(InputError, match="doctor --calibrate"):
        ModelProfile().resolve(BlendSettings(ratio="auto"), 8)


def test_a_text_range_survives_the_profiles_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    profile = ModelProfile(0.03, "static", (2,), (1.0,), text=TextRange(0.44, 0.025))
    save_profile(profile, "0" * 32, tmp_path)
    found = load_profile("0" * 32, tmp_path)
    assert found == profile
    rule = found.resolve(BlendSettings(ratio="auto"), 8).ratio
    assert isinstance(rule, TextRatio)
    assert (rule.least, rule.left_out) == (0.03, pytest.approx(0.49))
    file = tmp_path / "cacheblend.json"
    old = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("text", "reuse")}
    file.write_text(json.dumps(old))
    assert load_profile("0" * 32, tmp_path) == replace(profile, text=None)  # older profiles have no text range


def test_a_directory_can_declare_that_its_model_was_trained_for_independent_chunks(tmp_path: Any) -> None:
    (tmp_path / "cacheblend.json").write_text('{"blockwise": true}')
    found = load_profile("0" * 32, tmp_path)
    assert (found.blockwise, found.is_calibrated, found.resolve(BlendSettings(quality="high"), 8).ratio) == (
        True,
        True,
        0,
    )
    assert found.resolve(BlendSettings(quality="fast"), 8).ratio == 0
    tokenizer = tokenizer_named("byte_level")
    assert chosen_header_ids(tokenizer, None, found.blockwise) == ()
    assert chosen_header_ids(tokenizer, "given", found.blockwise) == chosen_header_ids(tokenizer, "given") != ()


@pytest.mark.parametrize("policy", ["static", "static-query", "hkvd"])
def test_a_blend_at_auto_equals_the_reference_at_the_ratio_it_reports(policy: str) -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene)
    engine.precompute(scene.chunks)
    positions, each = reference_scores(model, engine, scene)
    static = torch.cat(each[1:])
    ranked = static.sort(descending=True).values
    wanted = len(positions) // 3
    limit = float(1 - ranked[:wanted].sum() / ranked.sum()) + 1e-6
    engine.profile = replace(engine.profile, ratio=0.05, text=TextRange(limit, 0.0))
    got, recomputed, result = blended_logits(engine, scene, BlendSettings("auto", policy))
    assert result.ratio == pytest.approx(wanted / len(positions))
    assert len(recomputed) == wanted
    chosen = None
    if policy != "hkvd":
        attention = reference.question_attention(model, scene.header, scene.parts())[positions]
        chosen = top(positions, static if policy == "static" else static.sqrt() * attention, result.ratio)
        assert recomputed == chosen
    want = reference.blend(model, scene.header, scene.parts(), result.ratio, chosen=chosen)
    assert (got - want.logits).abs().max() < 1e-4
    done = engine.generate(scene.prompt, SamplingParams(max_tokens=1), BlendSettings("auto", policy))
    assert (done.ratio, done.usage.recomputed_tokens) == (result.ratio, wanted)


def test_chunks_without_a_rank_are_blended_at_the_profiles_ratio_and_ranked_afterwards() -> None:
    model, scene = model_of("llama"), Scene()
    engine = ranking_engine(model, scene, ranking="lazy")
    engine.precompute(scene.chunks)
    engine.profile = replace(engine.profile, ratio=0.05, text=TextRange(0.1, 0.0))
    auto = BlendSettings(ratio="auto")
    first, second = (engine.generate(scene.prompt, SamplingParams(max_tokens=1), auto) for _ in range(2))
    assert first.ratio == 0.05
    assert second.ratio > 0.05
    engine.ranking = "off"
    rank_for(engine, auto)
    assert engine.ranking == "now"
