"""Learning from end to end on a tiny random model saves better writers, resumes exactly, and reports clear errors."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from cacheblend_lab.learn import training
from cacheblend_lab.learn.blend import Lesson
from cacheblend_lab.learn.learn import Sizes, learn
from cacheblend_lab.learn.training import LearnSettings, Training
from cacheblend_rag.errors import InputError, ModelError
from tests.blending.families import _BASE, BLENDED, NOT_BLENDED, make_model
from tests.conftest import byte_level

SMALL = Sizes(prompt_tokens=420, batch_tokens=420, answers=0, requests=8, looked=2)
ANSWERED = replace(SMALL, answers=4)
SETTINGS = LearnSettings(steps=6, rank=2, checks=3)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write thirty documents of made-up words."""
    folder = tmp_path_factory.mktemp("documents")
    draw = random.Random(0)
    for number in range(30):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(250)]
        (folder / f"{number}.txt").write_text(f"Title {number}\n\n{' '.join(words)}.", encoding="utf-8")
    return folder


def tiny() -> dict[str, Any]:
    import transformers as hf

    model = make_model(hf.LlamaConfig(**{**_BASE, "vocab_size": 512}))
    model.name_or_path = "/home/somebody/model"
    return {
        "model": model,
        "tokenizer": byte_level(),
        "device": "cpu",
    }


class Learned(NamedTuple):
    trained: training.Trained
    saved: Path
    said: list[str]


@pytest.fixture(scope="module")
def answered(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Train a writer from the model's answers, too."""
    said: list[str] = []
    output = tmp_path_factory.mktemp("answered") / "writer"
    how: dict[str, Any] = {"settings": SETTINGS, "sizes": ANSWERED, "note": "mine", "say": said.append}
    trained, saved = learn(output=output, documents=[documents], **how, **tiny())
    assert saved == output
    return Learned(trained, saved, said)


@pytest.fixture(scope="module")
def first(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a writer from which further ones start."""
    output = tmp_path_factory.mktemp("first") / "writer"
    _, saved = learn(output=output, documents=[documents], settings=SETTINGS, sizes=SMALL, **tiny())
    assert saved == output
    return saved


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def test_a_better_writer_is_saved_with_its_card_in_pefts_format(answered: Learned) -> None:
    trained, saved, said = answered
    about = json.loads((saved / "writer.json").read_text())
    assert about["format"] == 1
    assert about["card"]["licences"] == "mine"
    assert all(each["after"] < each["before"] for each in about["card"]["held_out_kl"].values())
    assert len(about["card"]["curve"]) == len(trained.curve) == 4
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", 2, None)
    assert {tensor.dtype for tensor in weights(saved).values()} == {torch.bfloat16}
    assert [path.name for path in saved.parent.iterdir()] == ["writer"]
    assert any("min" in line and "steps" in line for line in said[:5]), "it says first how long it will take"


def test_a_writer_continues_from_another_writer_of_the_same_model(tmp_path: Path, documents: Path, first: Path) -> None:
    def run(name: str, **more: Any) -> Path | None:
        return learn(
            output=tmp_path / name, documents=[documents], sizes=SMALL, **{"settings": SETTINGS, **tiny(), **more}
        )[1]

    still = LearnSettings(steps=1, rank=4, checks=1, rate=1e-12)
    on = run("on", settings=still, start=first)
    assert on is not None
    one, other = weights(first), weights(on)
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one), "its rank is that of the first"
    card = json.loads((on / "writer.json").read_text())["card"]
    assert card["started_from"]["steps"] == 6
    assert card["settings"]["rank"] == 2
    with pytest.raises(InputError, match="another model"):
        run("other", start=first, model=make_model(BLENDED["qwen3"]()))
    with pytest.raises(InputError, match="cannot be used"):
        run("none", start=tmp_path / "missing")
    with pytest.raises(InputError, match="has no LoRA, so there is nothing to go on from"):
        run("untrained", start="probe")


@pytest.mark.slow
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, documents: Path, answered: Learned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> Path | None:
        return learn(output=tmp_path / name, documents=[documents], settings=SETTINGS, sizes=ANSWERED, **tiny())[1]

    whole = answered.saved
    step = Training._learn

    def broken(self: Training, share: float) -> None:
        if self._step == 3:
            self._save()
            raise KeyboardInterrupt
        step(self, share)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_learn", broken)
        with pytest.raises(KeyboardInterrupt):
            run("resumed")
    assert (tmp_path / "resumed.training.pt").exists()
    resumed = run("resumed")
    assert resumed is not None
    one, other = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    cards = [json.loads((each / "writer.json").read_text())["card"] for each in (whole, resumed)]
    assert cards[0]["held_out_kl"] == cards[1]["held_out_kl"]
    assert cards[0]["prompts"] == cards[1]["prompts"]


def test_a_run_does_not_continue_from_one_with_different_settings(
    tmp_path: Path, documents: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str = "w", **more: Any) -> Path | None:
        given = {"settings": SETTINGS, **tiny(), **more}
        # The model's answers are left out: they would be another model's.
        return learn(output=tmp_path / name, documents=[documents], sizes=SMALL, **given)[1]

    def stop(self: Training, share: float) -> None:
        self._save()
        raise OSError("broken off")

    monkeypatch.setattr(Training, "_learn", stop)
    with pytest.raises(OSError, match="broken off"):
        run()
    with pytest.raises(InputError, match="other settings"):
        run(settings=LearnSettings(steps=7, rank=2))
    with pytest.raises(InputError, match="another model"):
        run(model=make_model(tiny()["model"].config, seed=1))
    with pytest.raises(InputError, match="another start"):
        run(start=first)


def test_a_writer_that_is_not_better_is_not_saved(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.Trained, "share", lambda self, point: 1.0)
    trained, saved = learn(output=tmp_path / "w", documents=[documents], settings=SETTINGS, sizes=SMALL, **tiny())
    assert saved is None
    assert len(trained.curve) > 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_learning_stops_when_held_out_prompts_do_not_improve(tmp_path: Path, documents: Path) -> None:
    settings = LearnSettings(steps=40, rank=2, rate=1e-12, checks=40, patience=2)
    trained, _ = learn(output=tmp_path / "w", documents=[documents], settings=settings, sizes=SMALL, **tiny())
    assert "no better for 2 checks" in trained.stopped
    assert trained.curve[-1].step < 20


def test_too_little_text_an_existing_output_and_an_unblendable_model_are_refused(
    tmp_path: Path, documents: Path
) -> None:
    few = tmp_path / "few.txt"
    few.write_text("Too little.", encoding="utf-8")
    with pytest.raises(InputError, match="too little to learn from"):
        learn(output=tmp_path / "w", documents=[few], settings=SETTINGS, sizes=SMALL, **tiny())
    with pytest.raises(InputError, match="No such file"):
        learn(output=tmp_path / "w", documents=[tmp_path / "missing"], settings=SETTINGS, sizes=SMALL, **tiny())
    with pytest.raises(InputError, match="stays as it is"):
        learn(output=documents, documents=[documents], settings=SETTINGS, sizes=SMALL, **tiny())
    bloom = {**tiny(), "model": make_model(NOT_BLENDED["length-dependent rope"][0]())}
    with pytest.raises(ModelError, match="cannot be blended"):
        learn(output=tmp_path / "w", documents=[documents], settings=SETTINGS, sizes=SMALL, **bloom)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"minutes": 1, "steps": 1}, {"steps": 0}, {"steps": 1, "recomputed": 2}, {"steps": 1, "ratio": 1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LearnSettings(**wrong)


def test_batches_shrink_if_the_device_has_no_room(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    loss = Lesson.loss

    def small(self: Lesson, batch: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and len(batch.ids) > 1:
            raise torch.OutOfMemoryError
        return loss(self, batch, *arguments, **named)

    monkeypatch.setattr(Lesson, "loss", small)
    sizes = Sizes(prompt_tokens=420, batch_tokens=1700, answers=0, requests=8, looked=2)
    settings = LearnSettings(steps=3, rank=2, checks=1)
    trained, _ = learn(
        output=tmp_path / "w", documents=[documents], settings=settings, sizes=sizes, say=said.append, **tiny()
    )
    assert trained.curve[-1].step == trained.prompts == 3
    assert any(line.startswith("out of memory: batches of 1,190 tokens") for line in said)


def test_the_error_for_a_device_without_room_for_one_prompt_gives_advice(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: Lesson, *arguments: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Lesson, "loss", none)
    with pytest.raises(ModelError, match="no room for a single prompt"):
        learn(output=tmp_path / "w", documents=[documents], settings=SETTINGS, sizes=SMALL, **tiny())
