from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.evaluation.datasets.fiction.names import NameMaker, is_held_out
from cacheblend_rag.evaluation.datasets.fiction.world import QUESTION_KINDS, sample_context


def count(text: str) -> int:
    return len(text.split()) + text.count(".") + text.count("'")


def context_of(seed: int, **options):
    return sample_context(Random(seed), count, **{"chunk_tokens": 256, **options})


def places_stating(context, name: str, value: str) -> list[tuple[int, int]]:
    """Return (chunk, sentence) wherever `value` is said of `name`; two attributes may share a value."""
    found = [
        (index, place)
        for index, chunk in enumerate(context.chunks)
        for place, sentence in enumerate(chunk)
        if sentence.entity == name and sentence.value == value
    ]
    assert found
    return found


def test_the_same_seed_gives_the_same_context():
    assert context_of(5) == context_of(5)
    assert context_of(5) != context_of(6)


@given(st.integers(0, 10_000), st.sampled_from([48, 128, 512]), st.integers(1, 8), st.booleans())
@settings(max_examples=40)
def test_contexts_keep_their_limits(seed, chunk_tokens, chunks, missing):
    context = context_of(seed, chunks=chunks, chunk_tokens=chunk_tokens, missing_chunk=missing, questions=20)
    assert len(context.chunks) == chunks
    assert len(context.questions) <= 20
    for text in context.chunk_texts:
        assert count(text) <= chunk_tokens
        assert text == text.strip()
    assert {question.kind for question in context.questions} <= set(QUESTION_KINDS)


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=25)
def test_a_cross_chunk_fact_stands_in_a_chunk_without_the_name(seed, missing):
    context = context_of(seed, missing_chunk=missing, filler=0.1)
    for question in context.questions:
        if question.kind not in ("single", "cross"):
            continue
        name = question.entities[0]
        named = [
            name.removeprefix("the ") in " ".join(sentence.text for sentence in context.chunks[chunk][: place + 1])
            for chunk, place in places_stating(context, name, question.answer)
        ]
        assert (question.kind == "single") in named


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_every_answer_and_every_entity_in_between_is_stated(seed):
    context = context_of(seed, missing_chunk=True)
    for question in context.questions:
        if question.kind.startswith("two_hop"):
            bridge, answer = question.answer.split(", ")
            assert question.entities[1] == bridge
            places_stating(context, question.entities[0], bridge)
            places_stating(context, bridge, answer)
        else:
            places_stating(context, question.entities[0], question.answer)
        if question.alias:
            places_stating(context, question.entities[0], question.alias)


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


def test_sentences_are_grammatical_in_the_known_weak_spots():
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


def test_no_document_is_begun_behind_the_last_chunk():
    """With long tokens a heading does not fit where a short sentence would have."""
    for seed in range(60):
        context = sample_context(Random(seed), lambda text: 8 * count(text), chunks=2, chunk_tokens=800, questions=200)
        text = "\n".join(context.chunk_texts)
        for question in context.questions:
            assert all(name.removeprefix("the ") in text for name in question.entities)
