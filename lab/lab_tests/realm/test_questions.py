"""Tests published question files, and the check of answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_lab.realm.questions import RealmQuestion, read_questions
from cacheblend_rag.errors import InputError

PUBLISHED = {
    "NQ-open.dev.jsonl": (
        '{"question": "when was the last time anyone was on the moon", "answer": ["14 December 1972 UTC", "December 1972"]}\n',
        RealmQuestion("when was the last time anyone was on the moon", ("14 December 1972 UTC", "December 1972")),
    ),
    "webquestions.json": (
        '[{"utterance": "who does joakim noah play for?", "targetValue": '
        '"(list (description \\"Chicago Bulls\\") (description Gators))"}]',
        RealmQuestion("who does joakim noah play for?", ("Chicago Bulls", "Gators")),
    ),
    "test.json": (
        '[\n {"qId": "wqs000001", "answers": ["Lawyer"], "qText": "what did james k polk do before he was president?"}]',
        RealmQuestion("what did james k polk do before he was president?", ("Lawyer",)),
    ),
    "curated-full.tsv": (
        "1756\tfactoid\tWhen is Fashion week in NYC?\tSept?(ember)?|Feb(ruary)?\n",
        RealmQuestion("When is Fashion week in NYC?", ("Sept?(ember)?|Feb(ruary)?",), regex=True),
    ),
    "nq-test.qa.csv": (
        "who sang it\t['Peter Noone', \"D'Angelo\"]\n",
        RealmQuestion("who sang it", ("Peter Noone", "D'Angelo")),
    ),
    "own.jsonl": ('{"question": "Who?", "answers": "Ida"}\n', RealmQuestion("Who?", ("Ida",))),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    text, expected = PUBLISHED[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    read = read_questions(tmp_path / name)
    assert read.questions == [expected]
    assert not read.skipped


def test_an_unusable_row_is_skipped_and_named(tmp_path: Path) -> None:
    file = tmp_path / "trec.tsv"
    file.write_text("1\tfactoid\tWho?\tIda\n2\tfactoid\tWhere?\t(Aber\n3\n")
    read = read_questions(file)
    assert [question.text for question in read.questions] == ["Who?"]
    assert [row.partition(":")[0] for row in read.skipped] == ["line 2", "line 3"]
    file.write_text("x\n")
    with pytest.raises(InputError, match="NQ-open"):
        read_questions(file)


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        (RealmQuestion("", ("The Silver Heron",)), "silver heron", 1),
        (RealmQuestion("", ("1901", "in 1901")), "1902", 0),
        (RealmQuestion("", (r"Sept?(ember)?",), regex=True), "september", 1),
        (
            RealmQuestion("", (r"Sept?(ember)?",), regex=True),
            "in September",
            0,
        ),  # DrQA's match starts at the answer's start
        (RealmQuestion("", (r"62,?046",), regex=True), "62046 people", 1),
    ],
)
def test_an_answer_is_right_by_exact_match_or_by_its_expression(
    question: RealmQuestion, answer: str, right: int
) -> None:
    assert question.right(answer) == right


def test_answers_are_found_in_passages_as_whole_words() -> None:
    question = RealmQuestion("", ("Ida  Moor", "C++"))
    assert [m[0] for m in question.pattern.finditer("ida moor, Ida Moore, Ida\nMoor and C++.")] == [
        "ida moor",
        "Ida\nMoor",
        "C++",
    ]
