from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.fiction.entities import NameMaker, is_held_out
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.questions import QUESTION_KINDS
from cacheblend_lab.fiction.words import NICKNAMES, UNITS
from cacheblend_lab.fiction.world import sample_context
from cacheblend_rag.errors import InputError


def count(text: str) -> int:
    return len(text.split()) + text.count(".") + text.count("'")


def context_of(seed: int, **options):
    return sample_context(Random(seed), count, **{"chunk_tokens": 256, **options})


def places_stating(context, name: str, value: str) -> list[tuple[int, int]]:
    """Return (chunk, sentence) for every statement of `value` about `name`; two attributes may share a value."""
    found = [
        (index, place)
        for index, chunk in enumerate(context.chunks)
        for place, sentence in enumerate(chunk)
        if sentence.entity == name and sentence.value == value
    ]
    assert found
    return found


def test_equal_seeds_give_equal_contexts():
    assert context_of(5) == context_of(5)
    assert context_of(5) != context_of(6)


@given(
    st.integers(0, 10_000),
    st.sampled_from([48, 128, 512]),
    st.integers(1, 8),
    st.sampled_from([{}, {"missing_chunk": True}, {"interludes": True}, {"interludes": True, "crowded": True}]),
)
@settings(max_examples=40)
def test_contexts_stay_within_their_limits(seed, chunk_tokens, chunks, options):
    context = context_of(seed, chunks=chunks, chunk_tokens=chunk_tokens, questions=20, **options)
    assert len(context.chunks) == chunks
    assert len(context.questions) <= 20
    for text in context.chunk_texts:
        assert count(text) <= chunk_tokens
        assert text == text.strip()
    assert {question.kind for question in context.questions} <= set(QUESTION_KINDS)


def test_a_missing_chunk_and_interludes_exclude_each_other():
    with pytest.raises(InputError, match="missing_chunk or for interludes"):
        context_of(1, missing_chunk=True, interludes=True)


def spoken(context) -> list[tuple[int, int, object]]:
    """Return (chunk, place, sentence) in reading order."""
    return [(c, p, sentence) for c, chunk in enumerate(context.chunks) for p, sentence in enumerate(chunk)]


def title_of(row: tuple[int, int], context) -> tuple[int, str]:
    """Return the chunk and the text of the last title in front of a list's row."""
    titles = {title for kind in KINDS.values() for a in kind.attributes.values() for title in a.titles}
    return [(c, s.text) for c, p, s in spoken(context) if s.text in titles and (c, p) < row][-1]


def is_row(sentence) -> bool:
    return bool(sentence.value) and sentence.text.endswith(f": {sentence.value}.")


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=25)
def test_a_cross_chunk_fact_is_stated_in_a_chunk_without_the_name(seed, missing):
    context = context_of(seed, missing_chunk=missing, filler=0.1)
    for question in context.questions:
        if question.kind not in ("single", "cross"):
            continue
        name, value = question.entities[0], question.answer.split(" ")[0]
        value = value if value.isdigit() else question.answer
        named = [
            name.removeprefix("the ") in " ".join(sentence.text for sentence in context.chunks[chunk][: place + 1])
            for chunk, place in places_stating(context, name, value)
        ]
        assert (question.kind == "single") in named


def test_the_title_of_a_list_stands_in_a_chunk_before_its_rows():
    asked = 0
    for seed in range(40):
        context = context_of(seed, interludes=True)
        for question in (question for question in context.questions if question.kind == "table"):
            name = question.entities[0]
            rows = [
                (c, p) for c, p, s in spoken(context) if s.entity == name and s.value == question.answer and is_row(s)
            ]
            apart = [(row, title_of(row, context)) for row in rows if title_of(row, context)[0] < row[0]]
            assert apart
            for (chunk, place), (_, title) in apart:
                attribute = context.chunks[chunk][place].attribute
                kind = next(kind for kind in KINDS.values() if attribute in kind.attributes)
                assert title in kind.attributes[attribute].titles
            asked += 1
    assert asked >= 20


def test_two_lists_of_a_context_state_different_facts_about_the_same_names():
    shared = 0
    for seed in range(40):
        lists: dict[str, set[str]] = {}
        for _, _, sentence in spoken(context_of(seed, interludes=True)):
            if is_row(sentence):
                lists.setdefault(sentence.attribute, set()).add(sentence.entity)
        names = list(lists.values())
        shared += any(a & b for i, a in enumerate(names) for b in names[:i])
    assert shared >= 15


def test_the_unit_of_a_number_is_given_by_the_last_note_before_it_in_another_chunk():
    asked = 0
    for seed in range(60):
        context = context_of(seed, interludes=True)
        for question in (question for question in context.questions if question.kind == "unit"):
            number, unit = question.answer.split(" ")
            for chunk, place in places_stating(context, question.entities[0], number):
                notes = [
                    (c, u)
                    for c, p, s in spoken(context)
                    for u in UNITS
                    if s.text.endswith(f"counted by the {u}.") or s.text.endswith(f"everything by the {u}.")
                    if (c, p) < (chunk, place)
                ]
                assert notes[-1][1] == unit and notes[-1][0] < chunk
            asked += 1
    assert asked >= 20


def test_numbers_without_a_note_before_them_have_no_unit():
    for seed in range(20):
        context = context_of(seed)
        assert not any(question.answer.split(" ")[-1] in UNITS for question in context.questions)


def test_a_fact_about_a_nickname_stands_behind_the_chunk_that_explains_it():
    explained = [template.split("{v}")[0].removeprefix("{S}") for template in NICKNAMES]
    asked = 0
    for seed in range(60):
        context = context_of(seed, interludes=True)
        for question in (question for question in context.questions if question.kind == "nickname"):
            value = question.answer.split(" ")[0]
            value = value if value.isdigit() else question.answer
            name = question.entities[0].removeprefix("the ")
            for chunk, place in places_stating(context, question.entities[0], value):
                sentence = context.chunks[chunk][place]
                if sentence.nickname is None:
                    continue  # two attributes may share a value
                assert sentence.nickname.lower() in sentence.text.lower() and name not in sentence.text
                meant = [
                    (c, s)
                    for c, p, s in spoken(context)
                    if s.value == sentence.nickname and (c, p) < (chunk, place) and s.entity == question.entities[0]
                ]
                assert any(words in meant[-1][1].text for words in explained)
                before = context.chunks[chunk][:place]
                assert meant[-1][0] < chunk or not any(name in s.text for s in before)
                asked += 1
    assert asked >= 20


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_every_answer_and_every_intermediate_name_is_stated(seed):
    context = context_of(seed, interludes=True)
    for question in context.questions:
        values = question.answer.replace(": ", "; ").replace("; ", ", ").split(", ")
        stated = [value.removesuffix(f" {unit}") for value in values for unit in UNITS if value.endswith(f" {unit}")]
        last = stated[-1] if stated else values[-1]
        if question.kind.startswith("two_hop"):
            assert question.entities[1] == values[0] == question.found[0]
            places_stating(context, question.entities[0], values[0])
            places_stating(context, values[0], last)
        elif question.kind == "alias":
            alias, name = question.entities
            assert values[0] == name == question.found[0] and alias in question.text
            places_stating(context, name, alias)
            places_stating(context, name, last)
        elif question.kind == "comparison":
            a, year_a, b, year_b, first = values
            assert question.entities == question.found == (a, b)
            places_stating(context, a, year_a)
            places_stating(context, b, year_b)
            assert first == (a if int(year_a) < int(year_b) else b)
        else:
            places_stating(context, question.entities[0], last)
            assert question.found == ()


def test_every_kind_of_question_appears_with_interludes():
    def kinds(**options):
        contexts = (context_of(seed, chunk_tokens=512, **options) for seed in range(12))
        return {question.kind for context in contexts for question in context.questions}

    assert kinds(interludes=True) == set(QUESTION_KINDS)
    assert kinds(alias_share=0) == {"single", "cross", "two_hop", "two_hop_cross"}


@pytest.mark.parametrize("held_out", [True, False])
def test_training_and_held_out_contexts_share_no_name(held_out):
    for seed in range(5):
        context = context_of(seed, held_out=held_out)
        names = {sentence.entity for chunk in context.chunks for sentence in chunk if sentence.entity}
        assert names
        assert all(is_held_out(name) == held_out for name in names)


def test_names_do_not_repeat_within_a_context():
    maker = NameMaker(Random(0), held_out=True)
    names = [maker.draw(kind)[0] for kind in ("person", "company", "observatory", "ship") for _ in range(40)]
    assert len(set(names)) == len(names)


def test_sentences_avoid_known_grammatical_slips():
    text = "\n".join(line for seed in range(40) for line in context_of(seed).chunk_texts)
    for slip in (
        " of she ",
        " of he ",
        " a engineer",
        " a architect",
        " a orange",
        " an lion",
        "{",
        "}",
        "  ",
        " it's ",
    ):
        assert slip not in text


def test_no_document_begins_behind_the_last_chunk():
    """Use long tokens, with which a heading does not fit although a short sentence would."""
    for seed in range(60):
        context = sample_context(Random(seed), lambda text: 8 * count(text), chunks=2, chunk_tokens=800, questions=200)
        text = "\n".join(context.chunk_texts)
        for question in context.questions:
            assert all(name.removeprefix("the ") in text for name in question.entities)
