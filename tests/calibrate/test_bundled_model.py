"""Calibrates the bundled model from end to end, and tests its profile on a different kind of text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cacheblend_lab.datasets import demo_samples
from cacheblend_lab.fiction.__main__ import calibration_rows

from cacheblend_rag.blending.profile import ModelProfile, load_profile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate import calibrate_engine
from cacheblend_rag.calibrate.prompts import collect_prompts
from cacheblend_rag.calibrate.standard import Standard
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.retrieval.chunking import split_text

pytestmark = pytest.mark.slow

FOREIGN = Path(__file__).parents[2] / "docs/internals/vllm.md"


@pytest.fixture(scope="module")
def engine():
    with TransformersEngine() as engine:
        yield engine


def test_calibrating_a_model_trained_for_independent_chunks_is_refused(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "profile", ModelProfile(ratio=0.0, blockwise=True, origin="cacheblend.json"))
    with pytest.raises(InputError, match=r"cacheblend\.json says .* no ratio to find"):
        calibrate_engine(engine, [])


def test_a_blend_that_loses_answers_is_refused_by_the_questions_metric(engine, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    worlds = [
        demo_samples(engine.tokenizer, 1, seed, kinds=("cross",), chunks=3, chunk_tokens=128) for seed in range(10)
    ]
    samples = [sample for world in worlds for sample in world]
    rows = ({"question": each.question, "answers": each.answers, "chunks": each.texts} for each in samples)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = collect_prompts(engine, file, None, 10, metric="em")
    standard = Standard.as_good_by("em", 0.8, 0.8)
    found, _ = calibrate_engine(engine, prompts, tmp_path, standard=standard, by_deviation=False)
    assert (found.verdict, found.needed) == ("shown", 8)
    assert found.standard.full is not None
    assert found.standard.full > 0.5
    assert found.chosen is not None
    assert found.chosen.ratio > 0
    assert found.chosen.agreement.low >= 0.8
    kept = {each.ratio: each.agreement.value for each in found.measured}
    assert kept[0.0] < 0.8  # full KV reuse loses answers
    assert "exact match no more than 20.0% below full recompute's" in found.why


def test_few_prompts_choose_a_small_ratio_and_foreign_text_gets_a_higher_ratio(engine, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    store, rank = engine.store, engine.ranking
    rows = calibration_rows(engine.tokenizer, 4, engine.context_window, most=128)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = collect_prompts(engine, tmp_path / "prompts.jsonl", None, 4)
    found, file = calibrate_engine(engine, prompts, tmp_path)
    assert (engine.store, engine.ranking) == (store, rank)
    assert file.parent == tmp_path
    assert (found.verdict, found.needed) == ("not shown", 299)
    assert found.chosen is not None
    assert 0 < found.chosen.ratio < 0.15  # few prompts formerly ended at 0.15
    assert found.chosen.compute < 0.35
    assert "that takes 299" in found.why
    profile = load_profile("0" * 32, tmp_path)
    assert profile == replace(found.profile, calibrated=profile.calibrated)
    assert profile.text is not None

    engine.profile, engine.ranking = profile, "now"

    def ratio(chunks: list[Chunk], question: str) -> float:
        engine.precompute(chunks)
        prompt = rag_prompt(engine.tokenizer, chunks, question)
        done = engine.generate(prompt, SamplingParams(max_tokens=1), BlendSettings(ratio="auto"))
        assert done.usage.recomputed_tokens == round(
            done.ratio * sum(len(chunk.token_ids) for chunk in chunks[1:])
        )  # the first chunk stands where it was computed
        return done.ratio

    own = demo_samples(engine.tokenizer, 1, 99, chunks=4, chunk_tokens=128)[0]
    foreign = split_text(FOREIGN.read_text("utf-8"), engine.tokenizer, 128)[:4]
    of_own = ratio([make_chunk(text, engine.tokenizer) for text in own.texts], own.question)
    of_foreign = ratio(foreign, "What is a check layer?")
    assert profile.ratio <= of_own < of_foreign <= 0.6
