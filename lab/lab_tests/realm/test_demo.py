"""Tests the demonstration's world, and the demonstration with few steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_lab.realm.demo import CLOSED, ICT, PRETRAINED, TUNED, DemoSettings, make_world, run_demo
from cacheblend_lab.realm.finetune import FinetuneSettings
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.presets import demonstration
from cacheblend_lab.realm.pretrain import PretrainSettings
from lab_tests.realm.conftest import SHAPE


def test_a_worlds_answers_stand_in_the_named_passages_and_held_out_questions_have_new_entities(
    model: RealmModel,
) -> None:
    world = make_world(3, 20, model.tokenizer, 40)
    for question in [*world.train, *world.held_out]:
        assert question.passages
        for at in question.passages:
            assert question.pattern.search(world.passages[at].text)
            assert world.passages[at].title in question.group
    assert not {question.group for question in world.train} & {question.group for question in world.held_out}
    assert len({question.group for question in world.held_out}) == 6
    again, other = make_world(3, 20, model.tokenizer, 40), make_world(4, 20, model.tokenizer, 40)
    assert again == world
    assert other.passages[0] != world.passages[0]


def test_some_facts_are_stated_in_two_volumes_and_some_in_one(model: RealmModel) -> None:
    questions = make_world(3, 20, model.tokenizer, 40).held_out
    assert {1, 2} <= {len(question.passages) for question in questions}


def test_the_demo_uses_the_sizes_of_a_tiny_bert() -> None:
    how = DemoSettings()
    assert how.pretrain.bert == "tiny"
    assert how.finetune.rate > FinetuneSettings().rate
    assert how.finetune.steps < FinetuneSettings().steps


@pytest.mark.parametrize("said", [{"avx512_bf16": True}, {"amx_bf16": True}, {"avx512_bf16": False}, {}])
def test_the_demo_of_a_trained_bert_uses_the_same_worlds_and_the_cpus_fastest_dtype(
    said: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: said, raising=False)
    (tiny, tiny_tuning), (trained, tuning) = demonstration("tiny"), demonstration("minilm")
    assert (tiny.bert, trained.bert) == ("tiny", "minilm")
    assert trained.shape == replace(tiny.shape, dtype="bfloat16" if any(said.values()) else "float32")
    assert trained.warm_rate < tiny.warm_rate
    assert tuning.rate < tiny_tuning.rate


@pytest.mark.slow
def test_the_demo_pools_the_results_of_its_worlds(bert: Path, tmp_path: Path) -> None:
    pretrain = PretrainSettings(str(bert), SHAPE, warm_steps=4, warm_batch=4, steps=2, batch=2, refresh_every=0)
    how = DemoSettings(10, pretrain, FinetuneSettings(steps=2, batch=2))
    found = run_demo([0, 1], how, tmp_path)
    asked = [world["held_out"] for world in found["worlds"]]
    assert found["scores"][TUNED]["questions"] == sum(asked)
    for name, score in (("recall@1", ICT), ("em", CLOSED)):
        parts = [seed["scores"][TUNED][name]["mean"] - seed["scores"][score][name]["mean"] for seed in found["seeds"]]
        pooled = sum(part * count for part, count in zip(parts, asked, strict=True)) / sum(asked)
        assert found["gains"][name]["mean"] == pytest.approx(pooled)
    assert "em" not in found["scores"][PRETRAINED]
    again = run_demo([0, 1], how, tmp_path)  # all of it was done before
    assert again["scores"] == found["scores"]
