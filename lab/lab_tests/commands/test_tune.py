"""Tests `tune-retriever`, `--retriever` and `--answer` on the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cacheblend_lab.tuning.tune import TuneSettings
from cacheblend_lab.tuning.world import paraphrased_world
from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, RETRIEVER_FILE, load_sentence_transformer
from cacheblend_rag.retrieval.index import ChunkIndex
from tests.command_line import as_json

pytestmark = pytest.mark.slow

QUESTION = "What is the cargo of the Ivory Anchor?"


@pytest.fixture(autouse=True)
def few_passages_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check out of domain among 10 passages, not 400: embedding these takes most of a small run."""
    monkeypatch.setattr("cacheblend_lab.tuning.tune.TuneSettings", partial(TuneSettings, elsewhere=10))


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """Save the embedding model's first layer, for tests that do not depend on search results."""
    model = load_sentence_transformer(DEFAULT_EMBEDDING, "cpu")
    bert = model[0].auto_model
    bert.encoder.layer, bert.config.num_hidden_layers = bert.encoder.layer[:1], 1
    model.save_pretrained(str(tmp_path / "light"))
    return tmp_path / "light"


@pytest.fixture
def store(run, model_dir, documents, tmp_path) -> Path:
    directory = tmp_path / "store"
    result = run("index", documents, "--store", directory, "--model", model_dir, "--chunk-tokens", 40)
    assert result.exit_code == 0, result.stderr
    return directory


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"question": f"What is the cargo of ship number {n}?", "answers": ["salt"]} for n in range(48)]
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, {"question": "no answer"}])))
    return file


@pytest.fixture
def retriever(tmp_path: Path) -> Path:
    """Save the embedding model itself as a query encoder."""
    load_sentence_transformer(DEFAULT_EMBEDDING, "cpu").save_pretrained(str(tmp_path / "same"))
    (tmp_path / "same" / RETRIEVER_FILE).write_text(json.dumps({"embedding": DEFAULT_EMBEDDING}))
    return tmp_path / "same"


def test_a_tuning_run_announces_its_time_compares_results_and_saves_no_worse_retriever(
    run, model_dir, documents, light, questions, tmp_path
):
    store, index = tmp_path / "store", ["--model", model_dir, "--chunk-tokens", 40, "--embedding", light]
    assert run("index", documents, "--store", store, *index).exit_code == 0
    command = ["tune-retriever", "--store", store, "--model", model_dir, "--questions", questions, "--candidates", 2]
    command += ["--epochs", 1, "--answers", 2, "--output", tmp_path / "out"]
    shown = run(*command)
    assert shown.exit_code == 0, shown.stderr
    assert "Skipped qa.jsonl, line 49: the field 'answer' is missing" in shown.stderr
    assert "questions to judge with 2 chunks each" in shown.stderr
    for line in ("recall@5", "answers, exact match", "out of domain, recall@5", "Not better, not saved"):
        assert line in shown.stdout
    assert "12 held out" in shown.stdout
    assert not (tmp_path / "out").exists()


def test_a_wrong_file_or_output_is_named_before_anything_is_loaded(run, questions, tmp_path):
    base = ["tune-retriever", "--store", tmp_path, "--model", tmp_path / "nowhere"]
    wrong = run(*base, "--questions", tmp_path / "qestions.jsonl", "--output", tmp_path / "out")
    assert wrong.exit_code == 2 and "qestions.jsonl cannot be read" in wrong.stderr
    taken = run(*base, "--questions", questions, "--output", tmp_path)
    assert taken.exit_code == 2 and "stays as it is" in taken.stderr


def test_impossible_tuning_runs_are_refused(run, model_dir, store, questions, monkeypatch):
    monkeypatch.setattr("cacheblend_lab.tuning.questions._HOPELESS", 4)  # none of these questions come back
    base = ["tune-retriever", "--store", store, "--model", model_dir]
    assert "one of --questions FILE, --generate N and --demo" in run(*base).stderr
    assert run(*base, "--questions", questions, "--demo").exit_code == 2
    mixed = run(*base, "--demo")
    assert mixed.exit_code == 2 and "other documents than the demonstration's" in mixed.stderr
    wrote = run(*base, "--generate", 40)
    assert wrote.exit_code == 2 and "Use a larger --model, or give --questions" in wrote.stderr


def test_the_tuning_demo_with_another_seed_uses_another_world_and_a_separate_store(run, model_dir, monkeypatch):
    asked = []

    def small(tokenizer, seeds):  # type: ignore[no-untyped-def]
        return paraphrased_world(tokenizer, seeds, 1)

    def note(pipeline, questions, output, settings, *others):  # type: ignore[no-untyped-def]
        asked.append((pipeline.chunks.directory, questions, output, settings))
        raise InputError("seen")

    monkeypatch.setattr("cacheblend_lab.tuning.world.paraphrased_world", small)
    monkeypatch.setattr("cacheblend_lab.tuning.tune.tune", note)
    assert "seen" in run("tune-retriever", "--demo", "--model", model_dir, "--seed", 1).stderr
    ((directory, questions, output, settings),) = asked
    assert directory.name.endswith("-tuning-1") and output == directory.with_name(f"{directory.name}-retriever")
    assert settings.seed == settings.training.seed == 1
    expected = paraphrased_world(AutoTokenizer.from_pretrained(model_dir), (3, 4, 5), 1)
    assert questions == expected.questions
    with ChunkIndex(directory) as index:
        assert sorted(document.path for document in index.documents()) == sorted(expected.documents)


def test_ask_and_eval_search_with_a_retriever(run, model_dir, store, retriever, tmp_path):
    ask = ["marginal", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 2, "--k", 2, "--json"]
    plain, same = as_json(run(*ask)), as_json(run(*ask, "--retriever", retriever))
    assert [s["id"] for s in plain["sources"]] == [s["id"] for s in same["sources"]]
    missing = run(*ask, "--retriever", tmp_path / "missing")
    assert missing.exit_code == 4 and "tune-retriever" in missing.stderr
    (retriever / RETRIEVER_FILE).write_text('{"embedding": "another"}')
    assert "tuned for the embedding model another" in run(*ask, "--retriever", retriever).stderr
    row = {"question": QUESTION, "answers": ["salt"], "chunks": ["Her cargo is salt.", "She sails.", "It rains."]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    evaluate = [
        "eval",
        "--model",
        model_dir,
        "--dataset",
        tmp_path / "rows.jsonl",
        "--k",
        2,
        "--out",
        tmp_path / "report",
    ]
    evaluate += ["--methods", "full,marginal", "--max-tokens", 2]
    assert "another" in run(*evaluate, "--retriever", retriever).stderr
    found = as_json(run(*evaluate, "--json"))
    assert found["methods"]["marginal"]["n"] == 2


def test_marginal_answers_by_the_sum_over_chunks(run, model_dir, store):
    ask = ["marginal", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 2, "--k", 3]
    found = as_json(run(*ask, "--json"))
    assert found["answer"] == found["candidates"][0]["answer"]
    assert sum(source["prior"] for source in found["sources"]) == pytest.approx(1)
    shown = run(*ask)
    assert shown.exit_code == 0 and "different answers from 3 chunks" in shown.stdout


def test_a_store_is_embedded_again_and_back_without_losing_its_kv(run, model_dir, store, retriever):
    (retriever / RETRIEVER_FILE).write_text(json.dumps({"embedding": DEFAULT_EMBEDDING, "documents": True}))
    asked = ["ask", QUESTION, "--store", store, "--model", model_dir, "--json"]
    refused = run(*asked, "--retriever", retriever)
    assert refused.exit_code == 3 and "cacheblend store reembed" in refused.stderr
    before = as_json(run(*asked))
    found = as_json(run("store", "reembed", "--store", store, "--embedding", retriever, "--json"))
    assert found["before"] == DEFAULT_EMBEDDING and found["embedding"] == str(retriever) and found["chunks"] > 1
    after = as_json(run(*asked))
    assert [each["id"] for each in after["sources"]] == [each["id"] for each in before["sources"]]
    assert after["usage"]["reused_tokens"] == before["usage"]["reused_tokens"] > 0
    shown = run("store", "reembed", "--store", store, "--embedding", DEFAULT_EMBEDDING)
    assert f"embedded by {DEFAULT_EMBEDDING}; before: {retriever}" in " ".join(shown.stdout.split())
    missing = run("store", "reembed", "--store", store, "--embedding", retriever / "missing")
    assert missing.exit_code == 4 and "cannot be loaded" in missing.stderr


def test_an_index_records_the_full_path_of_its_embedding_model(
    run, model_dir, documents, retriever, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run("index", documents, "--store", "s", "--model", model_dir, "--embedding", retriever.name).exit_code == 0
    monkeypatch.chdir(documents)
    with ChunkIndex(tmp_path / "s") as index:
        assert index.stats().embedding == str(retriever.resolve())
        assert index.search(QUESTION, 1)
