"""Defines fictional entities, what is true about them, and how a sentence about them is put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from cacheblend_lab.fiction import words
from cacheblend_lab.fiction.asides import ASIDES, FILLER, FILLER_WORDS
from cacheblend_lab.fiction.names import NameMaker, article
from cacheblend_lab.fiction.phrases import KINDS, Attribute


@dataclass(frozen=True)
class Place:
    """Says where a fact is stated, and in which chunks what it refers to.

    Attributes:
        chunk: Index of the chunk that states it.
        named_in: Index of the chunk that tells whom it is about; of a nickname's, the one that names whom the nickname means.
        nickname: Whether it is stated of the entity's nickname.
        title_in: Index of the chunk with the title, for a row of a list.
        unit_in: Index of the chunk that says what its number is counted by, if any does.
        unit: What its number is counted by.
    """

    chunk: int
    named_in: int
    nickname: bool = False
    title_in: int | None = None
    unit_in: int | None = None
    unit: str = ""

    @property
    def named(self) -> bool:
        """Return whether the chunk itself tells whom the fact is about."""
        return self.named_in == self.chunk

    @property
    def kind(self) -> str:
        """Return what the fact needs beside its chunk: "single" (nothing), "cross", "nickname", "table" or "unit"."""
        if self.unit_in not in (None, self.chunk):
            return "unit"
        if self.title_in not in (None, self.chunk):
            return "table"
        if self.named:
            return "single"
        return "nickname" if self.nickname else "cross"


@dataclass
class Entity:
    """An entity and what the documents say about it.

    Attributes:
        kind: Key of `phrases.KINDS`.
        name: Its name as written inside a sentence.
        pronoun: "she", "he" or "it".
        alias: A nickname, if it has one.
        alias_in: Index of the chunk that states the nickname, -1 before that.
        alias_from: Index of the chunk that names whom that statement is about.
        introduced_in: Index of the chunk that names it first, -1 before that.
        named_in: Index of the last chunk that names it.
        facts: Attribute -> value.
        where: Attribute -> where it is stated, for the attributes that are.
    """

    kind: str
    name: str
    pronoun: str
    alias: str | None = None
    alias_in: int = -1
    alias_from: int = -1
    introduced_in: int = -1
    named_in: int = -1
    facts: dict[str, str] = field(default_factory=dict)
    where: dict[str, Place] = field(default_factory=dict)

    def answer(self, key: str) -> str:
        """Return the value of attribute `key`, with what its number is counted by."""
        unit = self.where[key].unit
        return f"{self.facts[key]} {unit}" if unit else self.facts[key]


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
