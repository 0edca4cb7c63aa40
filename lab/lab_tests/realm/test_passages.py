"""Articles become passages: no text is lost or doubled, titles stay with their text, and every corpus file is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import (
    Passage,
    cut,
    load_passages,
    read_corpus,
    save_passages,
    sentences,
    tokenize,
)
from cacheblend_rag.errors import InputError

WORDS = st.lists(
    st.sampled_from(["salt", "port", "Ship", "Moor.", "winter", "Every", "cook!", "1900"]), min_size=1, max_size=60
)


@given(WORDS, st.integers(2, 20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_passages_have_the_articles_sentences_in_order_and_none_twice(
    model: RealmModel, words: list[str], size: int
) -> None:
    text = " ".join(words)
    passages = list(cut("Title", text, model.tokenizer, size))
    assert " ".join(passage.text for passage in passages) == text
    for passage, tokens in zip(passages, tokenize(passages, model.tokenizer, 1000), strict=True):
        assert len(tokens.body) <= size or len(sentences(passage.text)) == 1


def test_sentences_end_at_full_stops_before_a_capital_and_at_line_ends() -> None:
    text = 'It sank. "Why?" asked Ida, at 3.5 knots.\nNobody knew.  The end'
    assert [text[a:b] for a, b in sentences(text)] == [
        "It sank.",
        '"Why?" asked Ida, at 3.5 knots.',
        "Nobody knew.",
        "The end",
    ]


def test_pieces_are_the_tokens_that_touch_the_characters(model: RealmModel) -> None:
    text = "Her home port is Glencliff. The cook is Ida Moor."
    (tokens,) = tokenize([Passage("", text)], model.tokenizer, 40)
    start = text.index("Glencliff")
    span = tokens.pieces(start, start + len("Glencliff"))
    assert span is not None
    assert model.tokenizer.decode(tokens.body[span[0] : span[1] + 1]) == "glencliff"
    assert tokens.pieces(len(text), len(text) + 5) is None


def test_documents_jsonl_and_dprs_table_give_equal_passages(model: RealmModel, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("# Ship AA\n\nIt carries salt.\n\n# Ship BB\n\nIt carries ice.\n")
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    rows = [{"title": "Ship AA", "text": "It carries salt."}, {"title": "Ship BB", "text": "It carries ice."}]
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "c.tsv").write_text('id\ttext\ttitle\n1\tIt carries salt.\tShip AA\n2\t"It carries ice."\tShip BB\n')
    expected = [Passage(**row) for row in rows]
    for corpus in (folder, tmp_path / "c.jsonl.gz", tmp_path / "c.tsv"):
        assert read_corpus(corpus, model.tokenizer, 40) == expected, corpus


def test_a_broken_corpus_is_named(model: RealmModel, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "Only this."}\n')
    (tmp_path / "rows.jsonl").write_text('{"title": "No text"}\n')
    (tmp_path / "table.tsv").write_text("a\tb\n1\t2\n")
    for name, said in (
        ("one.jsonl", "at least 2"),
        ("rows.jsonl", "row 1|line 1"),
        ("table.tsv", "columns id, text"),
        ("no", "No such"),
    ):
        with pytest.raises(InputError, match=said):
            read_corpus(tmp_path / name, model.tokenizer, 40)


def test_passages_are_loaded_as_saved(tmp_path: Path) -> None:
    made = [Passage("A “b”", "Line\nbreak \u2028 é"), Passage("", "x")]
    save_passages(made, tmp_path / "p.jsonl")
    assert load_passages(tmp_path / "p.jsonl") == made
