"""Tests reading, judging and splitting questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.tuning.questions import TuningQuestion, read_questions, split_questions
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import make_chunk
from tests.conftest import tokenizer_named


class FakeIndex:
    def __init__(self, *texts: str):
        self.held = [make_chunk(text, tokenizer_named("byte_level")) for text in texts]

    def chunks(self):
        return iter(self.held)


def test_rows_of_questions_and_answers_are_read_and_broken_rows_named(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    rows = [
        {"question": "Who?", "answers": ["Ada", " "], "group": 7},
        {"question": "Where?", "answer": "Bay"},
        {"question": "When?"},
        {"question": " ", "answer": "x"},
        {"question": "How?", "answer": ["", "the"]},
    ]
    file.write_text("\n".join([*map(json.dumps, rows), "no JSON"]), "utf-8")
    read = read_questions(file, FakeIndex())
    assert read.questions == [
        TuningQuestion("Who?", ("Ada",), group="7"),
        TuningQuestion("Where?", ("Bay",)),
    ]
    assert [row.where for row in read.skipped] == ["line 6", "line 3", "line 4", "line 5"]
    file.write_text(json.dumps(rows[2]))
    with pytest.raises(InputError, match="line 1: the field 'answer' is missing"):
        read_questions(file, FakeIndex())


@pytest.mark.parametrize("mode", [{"mode": "text"}, {}])
def test_a_file_of_llamaindex_is_mapped_to_the_chunks_of_its_nodes(tmp_path: Path, mode: dict) -> None:
    index = FakeIndex("The sea is calm.", "The town sleeps. Nobody is out.", "Bread is baked.")
    sea, town, bread = (chunk.id for chunk in index.held)
    data = {
        "queries": {"q1": "Is the sea calm?", "q2": "Who is out?", "q3": "Which node is not here?"},
        "corpus": {
            "n1": "The sea is calm.\n",
            "n2": "The town sleeps.",
            "n3": "gone",
            "n5": " ",
            "n4": "x The sea is calm. y Bread is baked.",
        },
        "relevant_docs": {"q1": ["n1"], "q2": ["n2", "n4"], "q3": ["n3", "n5"]},
        **mode,
    }
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(data))
    read = read_questions(file, index)
    assert [(q.text, q.relevant) for q in read.questions] == [
        ("Is the sea calm?", {sea}),
        ("Who is out?", {town, sea, bread}),
    ]
    assert [str(row) for row in read.skipped] == ["pairs.json, query q3: none of its nodes is a chunk of the index"]


def test_a_chunk_counts_as_found_by_its_id_or_else_by_an_answer_in_whole_words() -> None:
    chunk, other = FakeIndex("It was Ada-Marie, in 1911.", "It was nobody.").held
    assert TuningQuestion("?", ("adamarie",)).answered_by(chunk)
    assert TuningQuestion("?", ("nobody at all", "The 1911")).answered_by(chunk)
    assert not TuningQuestion("?", ("191",)).answered_by(chunk)
    known = TuningQuestion("?", ("1911",), frozenset([other.id]))
    assert known.answered_by(other) and not known.answered_by(chunk)


@given(st.integers(8, 30), st.integers(5, 9), st.integers(0, 9))
def test_a_split_leaves_groups_whole_and_loses_no_question(groups: int, each: int, seed: int) -> None:
    questions = [TuningQuestion(f"{g}-{i}?", ("x",), group=str(g)) for g in range(groups) for i in range(each)]
    split = split_questions(questions, seed)
    parts = [split.train, split.dev, split.held_out]
    assert sorted(q.text for part in parts for q in part) == sorted(q.text for q in questions)
    of = [{q.group for q in part} for part in parts]
    assert all(of) and sum(map(len, of)) == groups
    assert split_questions(questions, seed) == split


def test_too_few_questions_are_refused_with_advice() -> None:
    with pytest.raises(InputError, match=r"39 questions in 39 groups are too few.*--generate"):
        split_questions([TuningQuestion(f"{i}?", ("x",)) for i in range(39)], 0)
