"""Tests the table of lab/benchmarks/study.py, and that an interrupted study continues."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import study


def row(name: str, method: str, f1: float, **more: Any) -> dict[str, Any]:
    numbers = {
        "computed_tokens": 100,
        "selection_tokens": 0,
        "prompt_tokens": 100,
        "ttft_s": 4.0,
        "first_token_kl": 0.0,
        "reused_tokens": 0,
        "background_tokens": 0,
        "total_s": 5.0,
        "em": 0.0,
        "f1_model_tokens": 0.0,
        "agrees_with_reordered_full": None,
    }
    kind = {"set": "a", "group": name, "kind": "", "task": "qa", "agrees_with_full": True}
    return {"id": name, "method": method, "f1": f1, "rouge_l": 0.0, **numbers, **kind, **more}


def test_the_table_compares_each_method_with_full_recompute_on_the_questions_answered_by_all() -> None:
    less = {"computed_tokens": 10, "selection_tokens": 5, "ttft_s": 2.0, "first_token_kl": 0.5}
    rows = [row("1", "full", 1.0), row("1", "reuse", 0.5, **less, agrees_with_full=False)]
    rows += [row("2", "full", 0.4), row("2", "reuse", 0.4, **less)]
    rows += [row("2", "full", 0.0, set="b", task="summary", rouge_l=0.5), row("3", "full", 1.0)]
    rows += [row("2", "reuse", 1.0, set="b", task="summary", rouge_l=0.2, **less)]
    counted, *_, full, reuse = study.table(rows).split("\n")
    assert counted == "3 questions, 100 tokens a prompt"
    assert full.startswith("| full | 100% | 63.3 |")
    assert reuse.startswith("| reuse | 15% | 36.7 | -26.7 | 66.7 [")
    assert reuse.endswith(" | 2.0x | 0.5 |")


def test_a_study_answers_each_question_once_and_continues_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["Ada Brenmoor directs the observatory.", "The canteen opens at noon."]
    rows = [{"question": f"Who directs it, {at}?", "answers": ["Ada"], "chunks": texts} for at in range(3)]
    (tmp_path / "asked.json").write_text(json.dumps(rows))
    how = ["--model", "bundled", "--data", tmp_path, "--sets", tmp_path / "asked.json", "--max-tokens", 2]
    for questions in (1, 3, 3):
        given = [*how, "--methods", "full,reuse", "--questions", questions, "--out", tmp_path / "out"]
        monkeypatch.setattr(sys, "argv", ["study.py", *map(str, given)])
        study.main()
        shown = capsys.readouterr().out
        assert f"## All\n\n{questions} questions" in shown
    (answers,) = (tmp_path / "out").iterdir()
    _, *lines = answers.read_text().splitlines()
    assert len(lines) <= 2 * 4, "a question was answered again"
