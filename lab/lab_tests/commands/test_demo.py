"""Tests `demo` on the command line."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from cacheblend_lab import comparison
from cacheblend_rag.demo import bundle
from cacheblend_rag.demo.bundle import DemoQuestion
from cacheblend_rag.demo.methods import METHODS
from cacheblend_rag.engines import models
from cacheblend_rag.errors import InputError, ModelError
from tests.command_line import as_json

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]

QUESTIONS = [
    DemoQuestion("When was the observatory founded?", "1911", "single", "observatory.md"),
    DemoQuestion("What is her cargo?", "grain", "cross", "ships.txt"),
    DemoQuestion("Who is the director?", "Ada Brenmoor", "cross", "observatory.md"),
]


@pytest.fixture
def small_demo(monkeypatch, model_dir, documents):
    """Run the demo with the tests' model, documents and questions; return a function that changes the answers."""

    def questions(answers: list[str] | None = None) -> None:
        rows = [
            q if a is None else DemoQuestion(q.question, a, q.kind, q.source)
            for q, a in zip(QUESTIONS, answers or [None] * 3, strict=True)
        ]
        # The order matters: the modules imported here for the first time must find the real questions.
        for module in ("cacheblend_lab.comparison", "cacheblend_rag.demo.bundle"):
            monkeypatch.setattr(f"{module}.bundled_questions", lambda: list(rows))

    monkeypatch.setattr(models, "bundled_model_directory", lambda: Path(model_dir))
    monkeypatch.setattr(bundle, "bundled_corpus", lambda: documents)
    questions()
    return questions


def test_demo_json_has_every_question_with_every_method_and_matching_totals(run, small_demo, tmp_path):
    found = as_json(run("demo", "--store", tmp_path / "s", "--json"))
    assert sorted(q["question"] for q in found["questions"]) == sorted(q.question for q in QUESTIONS)
    for question in found["questions"]:
        assert list(question["methods"]) == list(METHODS) == list(found["totals"])
        for method in question["methods"].values():
            assert method["computed_tokens"] + method["reused_tokens"] == question["prompt_tokens"]
        assert question["methods"]["full recompute"]["reused_tokens"] == 0
        assert question["sources"]
    for name, total in found["totals"].items():
        methods = [question["methods"][name] for question in found["questions"]]
        assert total["right"] == sum(method["right"] for method in methods)
        assert total["ttft_s"] == pytest.approx(median(method["ttft_s"] for method in methods))


def test_demo_shows_the_first_question_of_a_kind_that_full_recompute_answers_correctly(run, small_demo, tmp_path):
    rows = {q["question"]: q for q in as_json(run("demo", "--store", tmp_path / "s", "--json"))["questions"]}
    assert not any(row["shown"] for row in rows.values())  # random weights know nothing
    said = [rows[q.question]["methods"]["full recompute"]["answer"] for q in QUESTIONS]
    small_demo([said[0], "not this", said[2] + "."])
    text = run("demo", "--store", tmp_path / "s").stdout
    assert 0 <= text.find(QUESTIONS[2].question) < text.find(QUESTIONS[0].question)
    assert QUESTIONS[1].question not in text
    assert "2 of 3" in text
    for name in METHODS:
        assert text.count(name) >= 4  # a method is explained, shown twice and summed up


def test_recomputing_more_of_given_documents_comes_nearer_to_full_recompute(run, model_dir, tmp_path, monkeypatch):
    compare, compared = comparison.compare_on_documents, []

    def once(*given: Any) -> Any:
        compared[:] = compared or [compare(*given)]
        return compared[0]

    monkeypatch.setattr(comparison, "compare_on_documents", once)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "house.md").write_text((ROOT / "docs/architecture.md").read_text("utf-8")[:3000])
    arguments = ["demo", "--documents", tmp_path / "docs", "--model", model_dir]
    found = as_json(run(*arguments, "--json"))["methods"]
    full, prefix, reuse, fast, high = found.values()
    assert full["sooner"] == full["compute"] == 1
    assert full["kl"] == prefix["kl"] == 0
    assert reuse["kl"] > fast["kl"] > high["kl"] > 0
    assert reuse["compute"] < fast["compute"] < high["compute"] < prefix["compute"] < 1
    text = run(*arguments).stdout
    for said in (*found, "static-query 15%", "static-query 50%", "95% intervals"):
        assert said in text


def test_a_missing_default_model_is_reported_in_one_line_and_a_missing_named_model_is_an_error(
    run, tmp_path, monkeypatch
):
    def missing(*_: object) -> None:
        raise ModelError("it is not installed")

    monkeypatch.setattr("cacheblend_lab.commands.demo.open_engine", missing)
    assert run("demo", "--documents", tmp_path / "none").exit_code == InputError.exit_code  # checked before loading
    (tmp_path / "note.md").touch()
    result = run("demo", "--documents", tmp_path)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, "Nothing is compared: it is not installed")
    assert run("demo", "--documents", tmp_path, "--model", "other").exit_code == ModelError.exit_code
    assert run("demo", "--model", "other").exit_code == InputError.exit_code
