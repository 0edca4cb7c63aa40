"""Tests the masked spans: names and dates, found by patterns or by spaCy's entities, and random spans."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.realm.examples import Examples, entity_spans, pattern_spans, random_spans
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Passage, tokenize
from lab_tests.realm.conftest import TOWNS


def found(sentence: str) -> list[str]:
    return [sentence[a:b] for a, b in pattern_spans(sentence)]


@pytest.mark.parametrize(
    ("sentence", "spans"),
    [
        ("The Silver Heron was launched in 1901.", ["Silver Heron", "1901"]),
        ("It was drawn by Lars Yorgate on 3 June 1911.", ["Lars Yorgate", "3 June 1911"]),
        ("Born in the 1920s, she moved to Aberport.", ["1920s", "Aberport"]),
        ("She kept 14 geese.", []),
        ("In March the Bank of England closed.", ["March", "Bank of England"]),
        ("Sailors left.", []),
    ],
)
def test_patterns_find_names_and_dates(sentence: str, spans: list[str]) -> None:
    assert found(sentence) == spans


def test_entities_that_name_something_and_dates_are_salient_spans() -> None:
    text = "Ida sold 3 ships in 1911."
    entities = [
        SimpleNamespace(start_char=0, end_char=3, label_="PERSON"),
        SimpleNamespace(start_char=9, end_char=10, label_="CARDINAL"),
    ]
    spans = entity_spans(SimpleNamespace(ents=entities, text=text))
    assert [text[a:b] for a, b in spans] == ["Ida", "1911"]


@given(st.text(alphabet="ab .", max_size=40), st.integers(0, 99))
def test_random_spans_are_whole_words(sentence: str, seed: int) -> None:
    spans = random_spans(sentence, Random(seed))
    assert len(spans) == bool(sentence.replace(".", "").strip())
    for a, b in spans:
        assert 1 <= len(sentence[a:b].replace(".", " ").split()) <= 4
        assert (a == 0 or sentence[a - 1] in " .") and (b == len(sentence) or sentence[b] in " .")


@pytest.mark.parametrize("salient", [True, False])
def test_masks_hide_one_span_of_the_sentence_and_nothing_of_the_title(
    model: RealmModel, passages: list[Passage], salient: bool
) -> None:
    tokenizer = model.tokenizer
    tokenized = tokenize(passages, tokenizer, 40)
    examples = Examples(passages, tokenized, tokenizer.mask_token_id, 24)
    drawn = examples.spans(Random(0), 60, pattern_spans if salient else None)
    assert len(drawn) == 60
    answers = set()
    for example in drawn:
        query, source = example.query, example.source
        assert len(query.ids) <= 24
        assert [at for at, piece in enumerate(query.ids) if piece == tokenizer.mask_token_id] == query.masked
        assert query.ids[: len(tokenized[source].title)] == tokenized[source].title
        whole = list(query.ids)
        for at, piece in zip(query.masked, query.targets, strict=True):
            whole[at] = piece
        text = tokenizer.decode(tokenized[source].body)
        assert tokenizer.decode(whole[len(tokenized[source].title) :]) in text
        answers.add(tokenizer.decode(query.targets))
    if salient:
        assert answers <= {"ida moor", *(str(1900 + n) for n in range(8)), *map(str.lower, TOWNS)}
    else:
        assert "salt" in answers or "carries salt" in answers


def test_the_inverse_cloze_task_removes_the_sentence_nine_times_out_of_ten(
    model: RealmModel, passages: list[Passage]
) -> None:
    tokenized = tokenize(passages, model.tokenizer, 40)
    queries, contexts = Examples(passages, tokenized, model.tokenizer.mask_token_id, 24).cloze(Random(0), 400)
    wholes = [tokens.body for tokens in tokenized]
    kept = sum(context.body in wholes for context in contexts)
    assert 20 <= kept <= 65
    assert all(query.ids for query in queries)
