"""Generates questions about the facts in a fictional world's documents, each with the kind of its dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Final

from cacheblend_lab.fiction.entities import Entity, Place
from cacheblend_lab.fiction.phrases import KINDS

QUESTION_KINDS: Final = (
    "single",
    "cross",
    "two_hop",
    "two_hop_cross",
    "nickname",
    "table",
    "unit",
    "alias",
    "comparison",
)
"""Kinds of questions by their dependencies; `world` describes each kind."""

_PREFERRED: Final = {
    "cross": 0.5,
    "two_hop_cross": 0.4,
    "alias": 0.1,
    "nickname": 0.9,
    "table": 0.9,
    "unit": 0.9,
    "comparison": 0.3,
}


@dataclass(frozen=True)
class Shares:
    """Holds the shares of some kinds of questions, each from 0 to 1.

    Attributes:
        two_hop: Largest share of two-hop questions, with at least one if any exists.
        alias: Share of a nicknamed entity's facts that are asked for by the nickname.
        comparison: Largest share of comparisons, with at least one if two entities can be compared.
    """

    two_hop: float = 0.25
    alias: float = 0.3
    comparison: float = 0.1


USUAL_SHARES: Final = Shares()


@dataclass(frozen=True)
class FictionQuestion:
    """Holds a question, its exact answer and its dependencies.

    Attributes:
        text: The question.
        answer: The answer, which begins with the intermediate results ("Mira Halwick, Aberport", "A, 1911; B, 1932:
            A").
        kind: One of `QUESTION_KINDS`.
        entities: Names to be found, in order; for an alias question the alias, then the name.
    """

    text: str
    answer: str
    kind: str
    entities: tuple[str, ...]

    @property
    def found(self) -> tuple[str, ...]:
        """Return the names in the answer that are followed by a fact about them, in order."""
        return self.entities if self.kind == "comparison" else self.entities[1:]

    @property
    def verdict(self) -> str:
        """Return the final name in a comparison's answer; empty for other kinds."""
        return self.answer[self.answer.rindex(": ") + 2 :] if self.kind == "comparison" else ""


def ask(
    rng: Random, entities: Sequence[Entity], shares: Shares = USUAL_SHARES
) -> tuple[list[FictionQuestion], list[FictionQuestion]]:
    """Return one-hop questions and two-hop questions about all facts in the entities' `where`."""
    by_name = {entity.name: entity for entity in entities}
    plain: list[FictionQuestion] = []
    hops: dict[str, FictionQuestion] = {}
    for entity in entities:
        for key, place in entity.where.items():
            attribute, value = KINDS[entity.kind].attributes[key], entity.facts[key]
            template = rng.choice(attribute.questions)
            if entity.alias and entity.alias_in >= 0 and rng.random() < shares.alias and not place.nickname:
                text, answer = template.format(E=entity.alias), f"{entity.name}, {entity.answer(key)}"
                plain.append(FictionQuestion(text, answer, "alias", (entity.alias, entity.name)))
            else:
                plain.append(
                    FictionQuestion(template.format(E=entity.name), entity.answer(key), place.kind, (entity.name,))
                )
            target = by_name.get(value)
            if target is None or target is entity or not target.where or not attribute.links:
                continue
            for second in rng.sample(list(target.where), min(2, len(target.where))):
                link = rng.choice(attribute.links).format(E=entity.name)
                text = rng.choice(KINDS[target.kind].attributes[second].questions).format(E=link)
                kind = "two_hop" if _alone(place) and _alone(target.where[second]) else "two_hop_cross"
                hops[text] = FictionQuestion(text, f"{value}, {target.answer(second)}", kind, (entity.name, value))
    return plain, list(hops.values())


def compare(entities: Sequence[Entity]) -> list[FictionQuestion]:
    """Return a question for each two entities of one kind with different years for a fact: which entity comes first."""
    found = []
    for kind, spoken in KINDS.items():
        for key, attribute in spoken.attributes.items():
            if attribute.comparison:
                stated = [entity for entity in entities if entity.kind == kind and key in entity.where]
                pairs = (pair for pair in combinations(stated, 2) if pair[0].facts[key] != pair[1].facts[key])
                found += [_compare(attribute.comparison, key, *pair) for pair in pairs]
    return found


def choose_questions(
    rng: Random, entities: Sequence[Entity], most: int, shares: Shares, *, comparisons: bool
) -> list[FictionQuestion]:
    """Draw up to ``most`` questions in random order, and prefer questions that need another chunk."""
    plain, hops = ask(rng, entities, shares)
    if comparisons:
        pairs = compare(entities)
        plain += rng.sample(pairs, min(len(pairs), max(1, int(most * shares.comparison))))
    for group in (plain, hops):
        rng.shuffle(group)
        group.sort(key=lambda question: rng.random() - _PREFERRED.get(question.kind, 0.0))
    chosen = (hops[: max(1, int(most * shares.two_hop))] + plain)[:most]
    rng.shuffle(chosen)
    return chosen


def _alone(place: Place) -> bool:
    return place.kind == "single"


def _compare(template: str, key: str, a: Entity, b: Entity) -> FictionQuestion:
    first = min((a, b), key=lambda entity: int(entity.facts[key]))
    answer = f"{a.name}, {a.facts[key]}; {b.name}, {b.facts[key]}: {first.name}"
    return FictionQuestion(template.format(a=a.name, b=b.name), answer, "comparison", (a.name, b.name))
