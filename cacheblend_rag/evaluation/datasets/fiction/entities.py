"""Fictional entities, what is true about them, and how a sentence about them is put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from cacheblend_rag.evaluation.datasets.fiction import words
from cacheblend_rag.evaluation.datasets.fiction.names import NameMaker, article
from cacheblend_rag.evaluation.datasets.fiction.phrases import ASIDES, FILLER, FILLER_WORDS, KINDS, Attribute


@dataclass
class Entity:
    """An entity and what the documents say about it.

    Attributes:
        kind: Key of `phrases.KINDS`.
        name: Its name as written inside a sentence.
        pronoun: "she", "he" or "it".
        alias: A nickname, if it has one.
        alias_in: Index of the chunk that states the nickname, -1 before that.
        introduced_in: Index of the chunk that names it first, -1 before that.
        named_in: Index of the last chunk that names it.
        facts: Attribute -> value.
        where: Attribute -> (index of the chunk that states it, whether that chunk has the name before it).
    """

    kind: str
    name: str
    pronoun: str
    alias: str | None = None
    alias_in: int = -1
    introduced_in: int = -1
    named_in: int = -1
    facts: dict[str, str] = field(default_factory=dict)
    where: dict[str, tuple[int, bool]] = field(default_factory=dict)


def capital(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[0].upper() + text[1:]


def render(template: str, entity: Entity, subject: str, value: str = "") -> str:
    """Fill a statement template.

    Args:
        template: A template of `phrases`.
        entity: Whom it is about.
        subject: What to call the entity here: its name, its pronoun or a noun ("the firm").
        value: The value to state.
    """
    possessive = {"she": "her", "he": "his", "it": "its"}.get(
        subject, subject + ("'" if subject.endswith("s") else "'s")
    )
    return template.format(
        S=capital(subject),
        s=subject,
        P=capital(possessive),
        o={"she": "her", "he": "him"}.get(subject, subject),
        E=entity.name,
        H=capital(entity.name.removeprefix("the ")),
        v=value,
        a=article(value) if value else "",
    )


def filler_sentence(rng: Random, kind: str | None = None) -> str:
    """Return a sentence that states nothing about any entity; for a `kind` often one that suits it."""
    pick = {slot: rng.choice(pool) for slot, pool in FILLER_WORDS.items()}
    for slot in ("place", "adj", "people"):
        pick[slot + "2"] = rng.choice([word for word in FILLER_WORDS[slot] if word != pick[slot]])
    templates = ASIDES[kind] if kind and rng.random() < 0.7 else FILLER
    return rng.choice(templates).format(**pick, Time=capital(pick["time"]), People=capital(pick["people"]))


def draw_kinds(rng: Random, count: int) -> list[str]:
    """Return the kinds of `count` entities; often the first two are alike, so that short contexts need the name."""
    kinds = rng.choices(list(KINDS), weights=[3, 3, 2, 2], k=count)
    if count > 1 and rng.random() < 0.4:
        kinds[1] = kinds[0]
    return kinds


def make_entities(rng: Random, names: NameMaker, kinds: Sequence[str], alias_share: float) -> list[Entity]:
    """Return entities of these kinds with all their facts; half of the names among the values are entities of the list."""
    entities = [Entity(kind, *names.draw(kind)) for kind in kinds]
    for entity in entities:
        if rng.random() < alias_share:
            entity.alias = names.nickname(entity.kind)
        for key, attribute in KINDS[entity.kind].attributes.items():
            entity.facts[key] = _value(rng, names, attribute, entity, entities)
    return entities


def _value(rng: Random, names: NameMaker, attribute: Attribute, entity: Entity, entities: Sequence[Entity]) -> str:
    if attribute.pool in KINDS:
        others = [other.name for other in entities if other.kind == attribute.pool and other is not entity]
        return rng.choice(others) if others and rng.random() < 0.5 else names.draw(attribute.pool)[0]
    if attribute.pool == "town":
        return names.town()
    return rng.choice(words.VALUES[attribute.pool])
