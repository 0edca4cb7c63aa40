"""Tests `cacheblend realm` from a folder of documents to scores, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cacheblend_lab.realm.demo import DemoSettings
from cacheblend_lab.realm.model import RealmModel
from cacheblend_rag.cli import app
from cacheblend_rag.errors import InputError
from lab_tests.realm.conftest import TOWNS, articles
from lab_tests.realm.test_questions import PUBLISHED

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": f"Where is the home port of Ship {chr(65 + n)}{chr(65 + n)}?", "answers": [town]}
    for n, town in enumerate(TOWNS)
]


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["realm", *map(str, words)], catch_exceptions=False)


@pytest.fixture(scope="module")
def place(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with documents, questions, and the models that the commands made from these."""
    folder = tmp_path_factory.mktemp("realm")
    (folder / "docs").mkdir()
    for passage in articles():
        with (folder / "docs" / f"{passage.title}.md").open("a") as file:
            file.write(f"# {passage.title}\n\n{passage.text}\n\n")
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    sizes = ("--warm-steps", "5", "--steps", "5", "--refresh-every", "2", "--batch", "2", "--passage-tokens", "40")
    made = run(
        "pretrain", "--corpus", folder / "docs", "-o", folder / "model", "--bert", bert, *sizes, "--query-tokens", "24"
    )
    assert made.exit_code == 0, made.output
    assert "patterns" in made.stderr or "spacy" in made.stderr
    assert "16 passages; 10 steps" in made.stdout
    assert f"cacheblend realm finetune --model {folder / 'model'} --questions FILE" in made.stdout
    tuned = run(
        "finetune", "-m", folder / "model", "-q", folder / "qa.jsonl", "-o", folder / "tuned", "--steps", "3", "--json"
    )
    assert tuned.exit_code == 0, tuned.output
    assert json.loads(tuned.stdout)["questions"] == len(QUESTIONS)
    return folder


def test_pretraining_records_the_age_of_the_index_and_draws_it(place: Path) -> None:
    assert (place / "model" / "staleness.svg").read_text().startswith("<svg")
    rows = [json.loads(line) for line in (place / "model" / "metrics.jsonl").read_text().splitlines()]
    masked = [row for row in rows if row["name"] == "masked spans"]
    assert [row["staleness"] for row in masked] == [row["step"] - row["index_step"] for row in masked]


def test_eval_prints_scores_with_intervals_and_saves_the_answers(place: Path) -> None:
    shown = run("eval", "-m", place / "tuned", "-q", place / "qa.jsonl", "--answers", place / "answers.jsonl")
    assert shown.exit_code == 0, shown.output
    assert "exact match" in shown.stdout
    assert "recall@20" in shown.stdout
    said = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert [row["question"] for row in said] == [row["question"] for row in QUESTIONS]
    found = json.loads(run("eval", "-m", place / "tuned", "-q", place / "qa.jsonl", "--json").stdout)
    assert found["recall@20"] == {"mean": 1.0, "low": pytest.approx(0.63, abs=0.01), "high": 1.0}
    assert "never fine-tuned" not in shown.stderr
    assert "never fine-tuned" in run("eval", "-m", place / "model", "-q", place / "qa.jsonl").stderr
    assert found["em"]["mean"] == pytest.approx(sum(row["em"] for row in said) / len(said))


@pytest.mark.parametrize("name", PUBLISHED)
def test_eval_reads_published_files(name: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PUBLISHED[name][0], encoding="utf-8")
    found = run("eval", "-m", place / "tuned", "-q", tmp_path / name, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["questions"] == 1


def test_wrong_arguments_are_named(place: Path, tmp_path: Path) -> None:
    for words, code, said in (
        (("eval", "-m", tmp_path, "-q", place / "qa.jsonl"), 4, "--output of pretrain or finetune"),
        (("eval", "-m", place / "tuned", "-q", tmp_path / "no.jsonl"), 2, "cannot be read"),
        (("pretrain", "--corpus", tmp_path / "no", "-o", tmp_path / "x"), 2, "No such file"),
        (("pretrain", "--corpus", place / "docs", "-o", tmp_path / "x", "--bert", tmp_path), 4, "tiny"),
        (("finetune", "-m", place / "model", "-q", place / "qa.jsonl", "-o", place / "model"), 2, "name another one"),
    ):
        failed = run(*words)
        assert failed.exit_code == code, failed.output
        assert said in failed.stderr


def test_the_dtype_of_bert_is_saved_with_the_model(place: Path, bert: Path, tmp_path: Path) -> None:
    none = ("--warm-steps", "0", "--steps", "0", "--passage-tokens", "40", "--query-tokens", "24")
    made = run(
        "pretrain", "--corpus", place / "docs", "-o", tmp_path / "x", "--bert", bert, *none, "--dtype", "bfloat16"
    )
    assert made.exit_code == 0, made.output
    assert RealmModel.load(tmp_path / "x").shape.dtype == "bfloat16"


def test_the_demo_starts_from_the_bundled_bert_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DemoSettings] = []

    def note(seeds: object, settings: DemoSettings, *others: object) -> None:
        asked.append(settings)
        raise InputError("seen")

    monkeypatch.setattr("cacheblend_lab.realm.demo.run_demo", note)
    run("demo")
    run("demo", "--bert", "tiny", "--warm-steps", "7", "--steps", "8", "--refresh-every", "9", "--finetune-steps", "10")
    trained, tiny = asked
    assert (trained.pretrain.bert, tiny.pretrain.bert) == ("minilm", "tiny")
    assert trained.pretrain.steps > 8
    assert (tiny.pretrain.warm_steps, tiny.pretrain.steps, tiny.pretrain.refresh_every) == (7, 8, 9)
    assert tiny.finetune.steps == 10
