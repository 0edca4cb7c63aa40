"""Tests the few questions at the end of indexing: they run only if useful, and within their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.calibrate.spot_check import spot_check
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.rag.pipeline import RagPipeline
from tests.blending.families import _BASE, make_model
from tests.conftest import byte_level

SMALL = LlamaConfig(**{**_BASE, "vocab_size": 512, "max_position_embeddings": 8192})
TOPICS = ("tower", "harbour", "mill", "bridge", "garden")


@pytest.fixture(autouse=True)
def seconds_between_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Advance the clock only when the check looks at it, so that a busy machine runs as many questions. The default
    step is 0."""
    each, looks = [0.0], count()
    clock = SimpleNamespace(perf_counter=lambda: each[0] * next(looks))
    monkeypatch.setattr("cacheblend_rag.calibrate.spot_check.time", clock)
    return each


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RagPipeline]:
    for topic in TOPICS:
        (tmp_path / f"{topic}.md").write_text(f"# The {topic}\n\nIt was restored by friends of the {topic}.")
    writer = getattr(request, "param", None)
    with (
        TransformersEngine(make_model(SMALL), tokenizer=byte_level(), device="cpu", writer=writer) as engine,
        RagPipeline(engine, tmp_path / "store", chunk_tokens=128) as pipeline,
    ):
        engine.profile = ModelProfile()
        engine.ranking = "now"
        pipeline.index(sorted(tmp_path.glob("*.md")))
        yield pipeline


def test_answers_of_an_uncalibrated_model_are_compared_with_full_recompute(pipeline: RagPipeline) -> None:
    pipeline.engine.profile = ModelProfile(ratio=1.0)
    found = spot_check(pipeline, tokens=1000, seconds=0.1)
    assert found is not None
    assert (found.questions, found.same) == (4, 4)
    assert found.speedup > 0


@pytest.mark.parametrize("pipeline", ["probe"], indirect=True)
def test_computation_for_the_first_prompt_alone_is_not_timed(
    pipeline: RagPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    generate = pipeline.engine.generate
    monkeypatch.setattr(pipeline.engine, "generate", lambda *of: answers.append(generate(*of)) or answers[-1])
    assert spot_check(pipeline, tokens=1000, seconds=0.1) is not None
    assert [each.mode for each in answers[::2]] == ["blend"] * 4
    assert not any(each.lacking("own_kv") for each in answers)


def test_no_question_runs_if_the_model_is_calibrated_or_time_is_short(
    pipeline: RagPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*args: Any) -> Any:
        raise AssertionError

    engine = pipeline.engine
    monkeypatch.setattr(engine, "generate", generate)
    assert spot_check(pipeline, tokens=0, seconds=1.0) is None
    late = spot_check(pipeline, tokens=1, seconds=100.0)  # at 100 s a token one question takes too long
    assert late is not None
    assert (late.questions, late.nothing) == (0, "one question would take more than 20 s")
    engine.profile = replace(engine.profile, calibrated={"why": "made up"})
    assert spot_check(pipeline, tokens=1000, seconds=1.0) is None


def test_a_small_index_gets_one_question_if_it_takes_seconds(
    pipeline: RagPipeline, seconds_between_looks: list[float]
) -> None:
    seconds_between_looks[0] = 3.0
    found = spot_check(pipeline, tokens=100, seconds=10.0)  # a tenth of this time is too little for any prompt
    assert found is not None
    assert found.questions == 1


def test_an_index_of_one_chunk_reports_too_few_chunks(pipeline: RagPipeline) -> None:
    for document in pipeline.chunks.documents()[1:]:
        pipeline.remove(document.path)
    found = spot_check(pipeline, tokens=1000, seconds=1.0)
    assert found is not None
    assert (found.questions, found.nothing) == (0, "no question finds two chunks")
