"""Tests the selection of the demo's questions that are shown one by one."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from cacheblend_lab import comparison
from cacheblend_lab.comparison import DemoRow, MethodAnswer, run_demo
from cacheblend_rag.demo.bundle import DemoQuestion
from cacheblend_rag.demo.methods import METHODS


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch):
    """Return a function from questions, each a kind and the methods that answer correctly, to the numbers of the shown
    and of all."""

    def run(*asked: tuple[str, set[str]]) -> tuple[list[int], list[int]]:
        questions = [DemoQuestion(str(number), "yes", kind, "a.md") for number, (kind, _) in enumerate(asked)]

        def compare(pipeline: object, question: DemoQuestion) -> DemoRow:
            right = asked[int(question.question)][1]
            return DemoRow(question, (), 9, {name: MethodAnswer("", name in right, 1.0, 9, 0) for name in METHODS})

        monkeypatch.setattr(comparison, "bundled_questions", lambda: list(questions))
        monkeypatch.setattr(comparison, "_compare", compare)
        rows = list(run_demo(Mock()))
        return [int(row.question.question) for row in rows if row.shown], [int(row.question.question) for row in rows]

    return run


ALL, FULL, BOTH = set(METHODS), {"full recompute", "prefix caching", "blend"}, {"full recompute", "prefix caching"}


def test_the_first_question_that_full_reuse_answers_wrongly_is_shown_whatever_the_blend_does(shown) -> None:
    told, asked = shown(("cross", set()), ("cross", ALL), ("cross", BOTH), ("cross", FULL), ("two_hop", FULL))
    assert told == [2]
    assert sorted(asked) == [0, 1, 2, 3, 4], "each is asked once"


def test_a_question_that_full_recompute_answers_wrongly_is_never_shown(shown) -> None:
    assert shown(("cross", {"full KV reuse"}), ("single", {"blend"}), ("two_hop_cross", {"blend"}))[0] == []


def test_the_first_right_question_is_shown_if_full_reuse_is_right_or_one_chunk_is_enough(shown) -> None:
    assert shown(("single", set()), ("single", ALL), ("single", BOTH), ("cross", ALL), ("cross", ALL))[0] == [3, 1]
