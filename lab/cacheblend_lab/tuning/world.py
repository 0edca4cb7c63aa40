"""Makes the demonstration's task: documents about fictional entities, and questions in different words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, Final

from cacheblend_lab.fiction.entities import (
    Entity,
    NameMaker,
    capital,
    draw_kinds,
    filler_sentence,
    make_entities,
    render,
)
from cacheblend_lab.fiction.phrases import KINDS, Attribute
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk

_SLOT = re.compile(r"\{\w\}")
_WORD = re.compile(r"[a-z]{3,}")
_STOP: Final = "the and was did does has have had what which who whom where when how many from for its with are is"


@dataclass(frozen=True)
class TuningWorld:
    """Holds documents, one per entity with one chunk per fact, and one question per fact."""

    documents: dict[str, list[Chunk]]
    questions: list[TuningQuestion]


def paraphrased_world(tokenizer: Any, seeds: Sequence[int], entities: int = 32) -> TuningWorld:
    """Make one world per seed and pool the worlds; no two worlds share a name.

    Every chunk names one entity and states one fact about it, between two filler sentences. The question's wording
    shares the fewest words with the statement. The bundled model's training has seen none of the names.
    """
    names = NameMaker(Random(f"names:{list(seeds)}"), held_out=True)
    documents: dict[str, list[Chunk]] = {}
    questions: list[TuningQuestion] = []
    for seed in seeds:
        rng = Random(f"paraphrased:{seed}")
        for entity in make_entities(rng, names, draw_kinds(rng, entities), 0.0):
            chunks = []
            for key, attribute in KINDS[entity.kind].attributes.items():
                statement, question = _worded_apart(rng, attribute)
                chunk = make_chunk(_passage(rng, entity, statement, entity.facts[key]), tokenizer)
                chunks.append(chunk)
                text = question.format(E=entity.name)
                questions.append(TuningQuestion(text, (entity.facts[key],), frozenset([chunk.id]), entity.name))
            documents[f"{entity.name.removeprefix('the ')}.txt"] = chunks
    return TuningWorld(documents, questions)


def digest_of(chunks: Sequence[Chunk]) -> str:
    """Return the digest under which a document of these chunks is indexed."""
    return chunk_id("\n\n".join(chunk.text for chunk in chunks))


def _passage(rng: Random, entity: Entity, statement: str, value: str) -> str:
    fact = capital(render(statement, entity, entity.name, value))
    around = [filler_sentence(rng, entity.kind), filler_sentence(rng)]
    return " ".join([around[0], fact, around[1]])


def _worded_apart(rng: Random, attribute: Attribute) -> tuple[str, str]:
    """Return the statement and the question of an attribute that share the fewest words; ties are drawn at random."""
    pairs = list(product(attribute.statements, attribute.questions))
    shared = [len(_words(statement) & _words(question)) for statement, question in pairs]
    return rng.choice([pair for pair, count in zip(pairs, shared, strict=True) if count == min(shared)])


def _words(template: str) -> frozenset[str]:
    """Return the first four letters of a template's words, without stop words: "employed" and "employs" are equal."""
    return frozenset(word[:4] for word in _WORD.findall(_SLOT.sub(" ", template.lower())) if word not in _STOP.split())
