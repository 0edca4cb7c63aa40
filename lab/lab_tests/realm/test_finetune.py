"""Tests fine-tuning and answering: trained and frozen parts, likelihoods against a loop, scores against known answers."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cacheblend_lab.realm import renewal
from cacheblend_lab.realm.demo import closed_book
from cacheblend_lab.realm.evaluate import (
    Library,
    answer,
    answer_likelihood,
    as_queries,
    evaluate,
    read,
    retrieve,
    summary,
)
from cacheblend_lab.realm.finetune import FinetuneSettings, Finetuning, finetune, open_library
from cacheblend_lab.realm.index import PassageIndex, newest_step
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Passage
from cacheblend_lab.realm.pretrain import PretrainSettings, pretrain
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.renewal import RenewedIndex
from cacheblend_lab.realm.runs import RunDirectory
from cacheblend_rag.errors import InputError
from lab_tests.realm.conftest import SHAPE, TOWNS, articles

CPU = torch.device("cpu")
PORTS = [
    RealmQuestion(f"Where is the home port of Ship {chr(65 + n)}{chr(65 + n)}?", (town,), passages=(2 * n, 2 * n + 1))
    for n, town in enumerate(TOWNS)
]


@pytest.fixture(scope="session")
def pretrained(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pretrained") / "model"
    how = PretrainSettings(str(bert), SHAPE, warm_steps=50, warm_batch=16, warm_rate=5e-4, steps=0, refresh_every=0)
    pretrain(articles(), output, how, CPU)
    return output


@pytest.fixture(scope="session")
def tuned(pretrained: Path) -> Path:
    output = pretrained.parent / "tuned"
    # At higher rates of either stage, the result depends on the processor's rounding: two to five ports of eight.
    finetune(pretrained, PORTS, output, FinetuneSettings(steps=400, batch=8, rate=1e-3, k=4), CPU)
    return output


def opened(directory: Path) -> tuple[RealmModel, Library, Collator]:
    model = RealmModel.load(directory)
    return model, open_library(directory, model), Collator(model.tokenizer, CPU)


@pytest.mark.slow
def test_fine_tuning_finds_more_answers_and_leaves_document_tower_and_index_unchanged(
    pretrained: Path, tuned: Path
) -> None:
    scores = []
    for directory in (pretrained, tuned):
        model, library, collator = opened(directory)
        scores.append(summary(evaluate(model, library, PORTS, collator, 4), ["" for _ in PORTS]))
    before, after = scores
    assert after["em"]["mean"] >= 0.75 > 0.25 >= before["em"]["mean"]
    assert after["recall@1"]["mean"] >= before["recall@1"]["mean"]
    old, new = RealmModel.load(pretrained).state_dict(), RealmModel.load(tuned).state_dict()
    moved = {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])}
    assert moved == {"query", "encoder", "reader"}
    files = [sorted((directory / "index").rglob("*.faiss"))[-1].read_bytes() for directory in (pretrained, tuned)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_fine_tuning_with_index_renewal_trains_the_document_tower_and_makes_the_final_index(
    pretrained: Path, tmp_path: Path
) -> None:
    output = tmp_path / "renewed"
    how = FinetuneSettings(steps=12, batch=8, rate=1e-3, k=4, refresh_every=4)
    given, library = finetune(pretrained, PORTS, output, how, CPU)
    model, opened_library, collator = opened(output)
    old = RealmModel.load(pretrained).state_dict()
    moved = {name.split(".")[0] for name, tensor in model.state_dict().items() if not torch.equal(old[name], tensor)}
    assert moved == {"query", "document", "encoder", "reader"}
    every = list(range(len(library.passages)))
    with torch.no_grad():
        vectors = model.document(collator.documents([library.tokenized[at] for at in every]))
    for found in (library.index, opened_library.index):
        assert found.step == 12
        assert torch.allclose(found.vectors([every])[0], vectors, atol=1e-5)
    rows = RunDirectory(output).metrics()
    assert rows[0]["index_step"] == 0
    assert all(row["staleness"] == row["step"] - row["index_step"] for row in rows)
    again, _ = finetune(pretrained, PORTS, output, how, CPU)  # all of it was done before
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in given.state_dict().items())


@pytest.mark.slow
def test_a_renewed_index_is_used_during_training_and_again_after_a_stop(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A spawned process would import PyTorch again, for ten seconds each time; test_pretrain.py covers spawning.
    forks = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(renewal, "multiprocessing", forks)
    how, run = FinetuneSettings(steps=100_000, batch=2, k=2, refresh_every=5), RunDirectory(tmp_path / "run")
    seen = 0

    def stop(done: float, of: int, at: str) -> None:
        if (newest_step(run.index) or 0) > seen:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            finetune(pretrained, PORTS, run.path, how, CPU, stop)
        seen = newest_step(run.index) or 0
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows[-1]["index_step"] > 0
    assert newest_step(pretrained / "index") == 0


@pytest.mark.slow
def test_candidates_have_the_same_relevance_by_current_parameters_as_by_a_fresh_index(tuned: Path) -> None:
    model, library, collator = opened(tuned)
    queries = collator.queries(as_queries(model, PORTS[:3]))
    index = RenewedIndex(RunDirectory(tuned), model, library.tokenized, collator)
    rows, expected = retrieve(model, library, queries, 4)
    found = model.relevance(model.query(queries), index.vectors(rows))
    assert torch.allclose(found, expected, atol=1e-5)
    found.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.document.parameters())


@pytest.mark.slow
def test_a_stopped_run_continues_where_it_was(pretrained: Path, tmp_path: Path) -> None:
    how = FinetuneSettings(steps=8, batch=4, save_every=3)
    expected, _ = finetune(pretrained, PORTS, tmp_path / "whole", how, CPU)

    def stop(done: float, of: int, at: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(pretrained, PORTS, tmp_path / "cut", how, CPU, stop)
    others = [replace(PORTS[0], answers=("Oakcliff",)), *PORTS[1:]]
    with pytest.raises(InputError, match="other settings"):
        finetune(pretrained, others, tmp_path / "cut", how, CPU)
    found, _ = finetune(pretrained, PORTS, tmp_path / "cut", how, CPU)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in expected.state_dict().items())
    assert [row["step"] for row in RunDirectory(tmp_path / "cut").metrics()] == list(range(8))


@pytest.mark.slow
def test_the_likelihood_of_an_answer_is_the_sum_over_its_spans(tuned: Path) -> None:
    model, _, collator = opened(tuned)
    texts = [Passage("", "Salt, ice and salt."), Passage("Salt", "No such thing."), Passage("", "ice")]
    vectors = torch.randn(3, SHAPE.vector)
    library = Library(texts, PassageIndex.build(vectors, 0), model)
    questions = [RealmQuestion("What does she carry?", ("salt", "ice")), RealmQuestion("Who?", ("Ida",))]
    rows = [[0, 1, 2], [2, 1, 0]]
    with torch.no_grad():
        spans, pairs = read(model, library, collator, as_queries(model, questions), rows)
        found = answer_likelihood(spans, pairs, library, questions, rows)
    begin = int(pairs.bodies[0, 0])
    tokens = [model.tokenizer.convert_ids_to_tokens(i) for i in library.tokenized[0].body]
    expected = 0.0
    for first in range(len(tokens)):
        for width in range(1, SHAPE.span_tokens + 1):
            said = "".join(tokens[first : first + width]).replace("##", "")
            if said in ("salt", "ice") and not tokens[first].startswith("##") and first + width <= len(tokens):
                expected += float(spans[0, begin + first, width - 1].exp())
    assert float(found[0, 0].exp()) == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < 1
    assert torch.isneginf(found[0, 1])  # the title is no text to answer from
    assert torch.isneginf(found[1]).all()


@pytest.mark.slow
def test_questions_without_a_reachable_answer_give_no_loss_and_break_nothing(tuned: Path) -> None:
    model, library, _ = opened(tuned)
    nobody, run = RealmQuestion("Who?", ("Nobody at all",)), RunDirectory(tuned)
    loss, told = Finetuning(model, library, [nobody], FinetuneSettings(batch=2), run, CPU).loss(0)
    assert loss is None
    assert told["answerable"] == 0
    loss, _ = Finetuning(model, library, [nobody, *PORTS], FinetuneSettings(batch=20), run, CPU).loss(0)
    assert loss is not None
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(p.grad is None for p in model.document.parameters())


@pytest.mark.slow
def test_an_answer_is_the_text_with_the_largest_probability_over_all_passages(tuned: Path) -> None:
    model, library, collator = opened(tuned)
    (said,) = answer(model, library, collator, PORTS[:1], 3)
    queries = as_queries(model, PORTS[:1])
    with torch.no_grad():
        rows, relevance = retrieve(model, library, collator.queries(queries), 3)
        spans, pairs = read(model, library, collator, queries, rows)
        every = RealmQuestion("", (said.text,))
        likelihood = answer_likelihood(spans, pairs, library, [every], rows)
    assert said.passages == rows[0]
    assert said.probability == pytest.approx(float((relevance.softmax(-1) * likelihood.exp()).sum()), rel=1e-3)


@pytest.mark.slow
def test_recall_counts_known_passages_or_else_passages_with_an_answer(tuned: Path) -> None:
    model, library, collator = opened(tuned)
    known, other = PORTS[0], RealmQuestion(PORTS[0].text, ("Whitmouth",))
    wrong = RealmQuestion(PORTS[0].text, PORTS[0].answers, passages=(99,))
    rows = evaluate(model, library, [known, other, wrong], collator, 3)
    assert [row["recall@20"] for row in rows] == [1, 1, 0]
    with pytest.raises(InputError, match="no questions"):
        evaluate(model, library, [], collator)


@pytest.mark.slow
def test_the_closed_book_reader_answers_only_learned_questions(pretrained: Path, tmp_path: Path) -> None:
    model, learn, unheard = RealmModel.load(pretrained), PORTS[:4], PORTS[4:]
    how = FinetuneSettings(steps=150, batch=4, rate=3e-3, k=2)
    rows = closed_book(model, learn, [*learn, *unheard], tmp_path, how, CPU)
    assert sum(row["em"] for row in rows[:4]) >= 3
    assert sum(row["em"] for row in rows[4:]) <= 1


@pytest.mark.slow
def test_equal_output_and_model_directories_and_missing_questions_are_refused(pretrained: Path) -> None:
    with pytest.raises(InputError, match="stays as it is"):
        finetune(pretrained, PORTS, pretrained, FinetuneSettings(), CPU)
    with pytest.raises(InputError, match="no questions"):
        finetune(pretrained, [], pretrained.parent / "x", FinetuneSettings(), CPU)
    with pytest.raises(InputError, match="refresh_every is -1"):
        FinetuneSettings(refresh_every=-1)
    assert json.loads((pretrained / "settings.json").read_text())["steps"] == 0
