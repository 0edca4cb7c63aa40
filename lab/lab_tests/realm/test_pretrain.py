"""Tests pre-training: retrieval and loss, an index renewed beside training, and continuing after a kill."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from cacheblend_lab.marginal import log_marginal
from cacheblend_lab.realm.index import PassageIndex, newest_step
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Passage
from cacheblend_lab.realm.pretrain import MASKED, Pretraining, PretrainSettings, pretrain
from cacheblend_lab.realm.runs import RunDirectory
from cacheblend_rag.errors import InputError, StoreError
from lab_tests.realm.conftest import SHAPE
from lab_tests.realm.trainers import training

CPU = torch.device("cpu")


@pytest.fixture
def settings(bert: Path) -> PretrainSettings:
    return PretrainSettings(
        str(bert), SHAPE, warm_steps=6, warm_batch=8, steps=6, batch=4, candidates=3, refresh_every=0
    )


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in RealmModel.load(directory).state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_source_passage_is_never_a_candidate_and_the_null_document_always_is(
    model: RealmModel,
    passages: list[Passage],
    settings: PretrainSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDirectory(tmp_path)
    trainer = Pretraining(model, passages, run, settings, CPU)
    trainer.open_index()
    seen = []
    fill = trainer._fill

    def watched(drawn, candidates):  # type: ignore[no-untyped-def]
        seen.extend(zip(drawn, candidates, strict=True))
        return fill(drawn, candidates)

    monkeypatch.setattr(trainer, "_fill", watched)
    for step in range(10):
        trainer._masked_loss(step)
    assert len(seen) == 40
    for example, candidates in seen:
        assert candidates[0] is None
        assert len(candidates) == 4
        own = trainer.passages[example.source]
        assert all(candidate is not own for candidate in candidates)


def test_the_loss_is_the_marginal_over_candidates_of_the_product_over_masked_tokens(
    model: RealmModel, passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    trainer = Pretraining(model, passages, RunDirectory(tmp_path), settings, CPU)
    index = trainer.open_index()
    loss, _ = trainer._masked_loss(0)
    drawn = trainer.examples.spans(Random(f"{settings.seed}:{MASKED}:0"), settings.batch, trainer.finder)
    collator, total = Collator(model.tokenizer, CPU), 0.0
    with torch.no_grad():
        for example in drawn:
            query = model.query(collator.queries([example.query]))
            (row,) = index.search(query, 3, [example.source])
            candidates = [None, *(trainer.passages[at] for at in row)]
            f = model.relevance(query, model.document(collator.documents(candidates)))
            log_p = []
            for candidate in candidates:
                pair = collator.pairs([example.query], [candidate])
                logits = model.encoder(**pair.arguments()).logits[0].log_softmax(-1)
                log_p.append(
                    sum(logits[1 + at, y] for at, y in zip(example.query.masked, example.query.targets, strict=True))
                )
            total += float(log_marginal(f, torch.tensor([log_p]))[0])
    assert loss is not None
    assert loss.item() == pytest.approx(-total / len(drawn), rel=1e-4)


def test_a_step_moves_towers_and_encoder(
    model: RealmModel, passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    trainer = Pretraining(model, passages, RunDirectory(tmp_path), settings, CPU)
    trainer.open_index()
    loss, _ = trainer._masked_loss(0)
    assert loss is not None
    loss.backward()
    for part in (model.query, model.document, model.encoder):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())


@pytest.mark.slow
def test_a_run_stopped_after_a_checkpoint_ends_with_the_weights_of_an_uninterrupted_one(
    passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    pretrain(passages, tmp_path / "whole", settings, CPU)
    expected = weights(tmp_path / "whole")

    def stop_at(step: int, at: str):  # type: ignore[no-untyped-def]
        def say(done: float, of: int, name: str) -> None:
            if (done, name) == (step, at):
                raise KeyboardInterrupt

        return say

    def checkpointed(steps: int, name: str) -> None:
        """Stop in the middle of a stage, and continue."""
        output = tmp_path / f"{name}-{steps}"
        with pytest.raises(KeyboardInterrupt):
            pretrain(passages, output, settings, CPU, stop_at(steps, name))
        pretrain(passages, output, settings, CPU)
        assert same(weights(output), expected)
        rows = [(row["stage"], row["step"]) for row in RunDirectory(output).metrics()]
        assert rows == [(stage, step) for stage in (0, 1) for step in range(6)]

    checkpointed(3, "warm start")
    checkpointed(2, "masked spans")


@pytest.mark.slow
def test_ict_brings_a_sentence_and_its_passage_together(
    passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    how = replace(settings, warm_steps=60, warm_rate=3e-3, steps=0)
    pretrain(passages, tmp_path / "ict", how, CPU)
    losses = [row["ict"] for row in RunDirectory(tmp_path / "ict").metrics()]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    pretrain(passages, tmp_path / "none", replace(how, ict=False), CPU)
    assert RunDirectory(tmp_path / "none").metrics() == []


@pytest.mark.slow
def test_a_bert_without_a_head_first_learns_to_fill_in_words(
    headless: Path, passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    how = replace(settings, bert=str(headless), ict=False, warm_steps=60, warm_rate=3e-3, steps=0)
    pretrain(passages, tmp_path, how, CPU)
    losses = [row["words"] for row in RunDirectory(tmp_path).metrics()]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_different_settings_or_a_running_process_in_the_directory_are_refused(
    passages: list[Passage], settings: PretrainSettings, tmp_path: Path
) -> None:
    how = replace(settings, warm_steps=0, steps=0)
    pretrain(passages, tmp_path, how, CPU)
    with pytest.raises(InputError, match="seed was 0, is 1"):
        pretrain(passages, tmp_path, replace(how, seed=1), CPU)
    with RunDirectory(tmp_path).alone({}), pytest.raises(StoreError, match="Another run"):
        pretrain(passages, tmp_path, how, CPU)
    with pytest.raises(InputError, match="steps is -1"):
        replace(how, steps=-1)


def refreshers(trainer: int) -> list[int]:
    """Return the processes started by a trainer."""
    return [int(pid) for pid in Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_killing_trainer_or_refresher_loses_nothing_and_the_trainer_never_waits(bert: Path, tmp_path: Path) -> None:
    output, steps = tmp_path / "run", 20_000
    run = RunDirectory(output)
    with training(bert, output, steps) as (trainer, told):
        known = 0
        while True:
            done, at = told.recv()
            newest = newest_step(run.index) or 0
            # After the first renewal: kill the process that did it, and wait for another renewal.
            if at == "masked spans" and not known and newest > 0:
                (pid,) = refreshers(trainer)
                os.kill(pid, signal.SIGKILL)
                known = newest
            elif known and newest > known + 5:
                break
            assert done < steps, "the index was not renewed in time"
    checkpoint = run.newest()
    assert checkpoint is not None
    assert checkpoint[1] >= done - 5
    # The existing index is whole.
    PassageIndex.load(run.index)
    with training(bert, output, steps) as (trainer, told):
        first, _ = told.recv()
        assert first == checkpoint[1] + 1
        # While its refresher stands still, the trainer takes its steps, and its index grows old.
        (stopped,) = refreshers(trainer)
        os.kill(stopped, signal.SIGSTOP)
        while told.recv()[0] < first + 40:
            pass
    os.kill(stopped, signal.SIGKILL)
    rows = [row for row in run.metrics() if row["stage"] == MASKED]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["staleness"] == row["step"] - row["index_step"] for row in rows)
    assert len({row["index_step"] for row in rows[-30:]}) == 1
    assert rows[-1]["staleness"] >= 30  # a running refresher renews it every 5 steps
