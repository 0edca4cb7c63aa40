import json
from random import Random

import pytest

from cacheblend_lab.fiction.entities import is_held_out
from cacheblend_lab.fiction.phrases import KINDS
from training.make_corpus import DEMO_FOLDER, PLANS, SEED, write_documents

QUESTIONS = json.loads((DEMO_FOLDER / "questions.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def documents():
    return {document.plan.name: document for document in write_documents(Random(SEED))}


def test_the_shipped_corpus_equals_the_commands_output(documents):
    for plan in PLANS:
        assert (DEMO_FOLDER / "corpus" / plan.name).read_text(encoding="utf-8") == documents[plan.name].text


def test_the_corpus_has_enough_chunks_and_only_held_out_names(documents):
    chunks = [chunk for document in documents.values() for chunk in document.chunks]
    assert 45 <= len(chunks) <= 60
    assert all(is_held_out(entity.name) for document in documents.values() for entity in document.entities)


@pytest.mark.parametrize("asked", QUESTIONS, ids=[asked["question"] for asked in QUESTIONS])
def test_a_question_has_one_answer_and_its_kind_follows_from_the_chunks(asked, documents):
    document = documents[asked["source"]]
    by_name = {entity.name: entity for entity in document.entities}
    *bridges, final = asked["answer"].split(", ")
    start = max((name for name in by_name if name in asked["question"]), key=len)
    entities = [by_name[name] for name in (start, *bridges)]
    named = []
    for entity, value in zip(entities, [*bridges, final], strict=True):
        attributes = KINDS[entity.kind].attributes
        stated = [key for key in entity.where if entity.facts[key] == value]
        assert stated
        if value == final:
            key = next(
                key for key in stated if fits(asked["question"], attributes[key].questions, start, bool(bridges))
            )
            named.append(entity.where[key].named)
        else:
            named.append(entity.where[stated[0]].named)
    kinds = {(1, True): "single", (1, False): "cross", (2, True): "two_hop", (2, False): "two_hop_cross"}
    assert asked["kind"] == kinds[len(named), all(named)]


def fits(question, templates, name, two_hop):
    if not two_hop:
        return question in [template.format(E=name) for template in templates]
    return any(
        question.startswith(template.split("{E}")[0]) and question.endswith(template.split("{E}")[1])
        for template in templates
    )


def test_questions_cover_every_file_and_the_main_kinds():
    assert len({asked["question"] for asked in QUESTIONS}) == len(QUESTIONS) >= 20
    assert {asked["source"] for asked in QUESTIONS} == {plan.name for plan in PLANS}
    assert {asked["kind"] for asked in QUESTIONS} == {"single", "cross", "two_hop", "two_hop_cross"}


@pytest.mark.parametrize("asked", QUESTIONS, ids=[asked["question"] for asked in QUESTIONS])
def test_the_answer_to_a_question_stands_in_its_document(asked):
    assert asked["answer"].split(", ")[-1] in (DEMO_FOLDER / "corpus" / asked["source"]).read_text("utf-8")
