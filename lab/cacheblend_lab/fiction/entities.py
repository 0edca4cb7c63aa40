"""Defines fictional entities, their names and their facts, and renders sentences about entities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from cacheblend_lab.fiction import words
from cacheblend_lab.fiction.phrases import KINDS, Attribute
from cacheblend_lab.fiction.words import ASIDES, FILLER, FILLER_WORDS

_HELD_OUT_SHARE = 8


def is_held_out(name: str) -> bool:
    """Return whether `name` belongs to the eighth of all names that training never uses."""
    return blake2b(name.encode(), digest_size=8).digest()[0] % _HELD_OUT_SHARE == 0


def article(word: str) -> str:
    """Return the indefinite article of `word`."""
    return "an" if word[0].lower() in "aeiou" else "a"


class NameMaker:
    """Draws entity names and invented words for one context.

    Args:
        rng: Source of randomness.
        held_out: Whether to draw held-out names only, or training names only.
        distinct_first_names: Whether to reuse first names of people only after all have been used.
    """

    def __init__(self, rng: Random, *, held_out: bool, distinct_first_names: bool = False) -> None:
        self._rng = rng
        self._distinct = distinct_first_names
        self._held_out = held_out
        self._used: set[str] = set()

    def draw(self, kind: str) -> tuple[str, str]:
        """Return a new name of `kind` as written inside a sentence, and its pronoun.

        The distinguishing word of a name (surname, or a ship's two words) is not repeated within the context.
        """
        rng = self._rng
        while True:
            pronoun, first = "it", ""
            if kind == "person":
                woman = rng.random() < 0.5
                pronoun = "she" if woman else "he"
                key = self._word(words.SURNAMES)
                pool = words.WOMEN if woman else words.MEN
                free = [name for name in pool if name not in self._used] if self._distinct else pool
                first = rng.choice(free or pool)
                name = f"{first} {key}"
            elif kind == "company":
                key = self._word(words.SURNAMES)
                name = f"{key} {rng.choice(words.COMPANY_WORDS)}"
            elif kind == "observatory":
                key = self._word(words.SURNAMES)
                name = f"the {key} Observatory"
            else:
                first = rng.choice(words.SHIP_FIRST)
                second = rng.choice(words.SHIP_SECOND)
                name = key = f"the {first} {second}"
            if key not in self._used and is_held_out(name) == self._held_out:
                self._used |= {key, first} if self._distinct else {key}
                return name, pronoun

    def town(self) -> str:
        """Return a town's name; towns may repeat."""
        return self._word(words.TOWNS)

    def nickname(self, kind: str) -> str:
        """Return a new nickname for an entity of `kind`."""
        while True:
            name = f"{self._rng.choice(words.NICK_FIRST)} {self._rng.choice(words.NICK_SECOND)}"
            if name not in self._used:
                self._used.add(name)
                return name if kind == "person" else f"the {name}"

    def _word(self, known: tuple[str, ...]) -> str:
        rng = self._rng
        draw = rng.random()
        if draw < 0.72:
            return rng.choice(known)
        if draw < 0.9:
            fronts, backs = rng.choice(((words.NAME_FRONTS, words.NAME_BACKS), (words.TOWN_FRONTS, words.TOWN_BACKS)))
            return rng.choice(fronts) + rng.choice(backs)
        return self._spelled()

    def _spelled(self) -> str:
        """Return a pronounceable word of random letters."""
        rng = self._rng
        syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
        return ("".join(syllables) + rng.choice(["", "n", "r", "s", "x", "lt"])).capitalize()


@dataclass(frozen=True)
class Place:
    """Holds the chunk that states a fact, and the chunks that the fact depends on.

    Attributes:
        chunk: Index of the chunk that states the fact.
        named_in: Index of the chunk that names the entity; for a nickname, of the chunk with the name that the nickname
            means.
        nickname: Whether the fact's sentence uses the entity's nickname.
        title_in: Index of the chunk with the list's title, for a row of a list.
        unit_in: Index of the chunk that states the unit of the fact's number, if a chunk does.
        unit: Unit of the fact's number, such as "thousand"; may be empty.
    """

    chunk: int
    named_in: int
    nickname: bool = False
    title_in: int | None = None
    unit_in: int | None = None
    unit: str = ""

    @property
    def named(self) -> bool:
        """Return whether the chunk that states the fact also names the entity."""
        return self.named_in == self.chunk

    @property
    def kind(self) -> str:
        """Return the fact's dependency on another chunk: "single" (none), "cross", "nickname", "table" or "unit"."""
        if self.unit_in not in (None, self.chunk):
            return "unit"
        if self.title_in not in (None, self.chunk):
            return "table"
        if self.named:
            return "single"
        return "nickname" if self.nickname else "cross"


@dataclass
class Entity:
    """Holds an entity, its facts, and where the documents state the facts.

    Attributes:
        name: Name as written inside a sentence.
        pronoun: "she", "he" or "it".
        alias_in: Index of the chunk that states the nickname, -1 until a chunk does.
        alias_from: Index of the chunk that names the entity for the statement of the nickname.
        introduced_in: Index of the first chunk that names the entity, -1 until a chunk does.
        named_in: Index of the last chunk that names the entity.
        where: Attribute -> place of its statement, for the stated attributes only.
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
        """Return the value of attribute `key`, with the number's unit if there is one."""
        unit = self.where[key].unit
        return f"{self.facts[key]} {unit}" if unit else self.facts[key]


def capital(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[0].upper() + text[1:]


def render(template: str, entity: Entity, subject: str, value: str = "") -> str:
    """Fill a statement template.

    Args:
        template: A template of `phrases`.
        entity: Entity that the sentence is about.
        subject: Word for the entity in the sentence: its name, its pronoun or a noun ("the firm").
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
    """Return a sentence that states no fact; 70% of the sentences for a `kind` of entity suit that kind."""
    pick = {slot: rng.choice(pool) for slot, pool in FILLER_WORDS.items()}
    for slot in ("place", "adj", "people"):
        pick[slot + "2"] = rng.choice([word for word in FILLER_WORDS[slot] if word != pick[slot]])
    templates = ASIDES[kind] if kind and rng.random() < 0.7 else FILLER
    return rng.choice(templates).format(**pick, Time=capital(pick["time"]), People=capital(pick["people"]))


def draw_kinds(rng: Random, count: int) -> list[str]:
    """Return the kinds of `count` entities; often the first two are equal, so that short contexts need the name."""
    kinds = rng.choices(list(KINDS), weights=[3, 3, 2, 2], k=count)
    if count > 1 and rng.random() < 0.4:
        kinds[1] = kinds[0]
    return kinds


def make_entities(rng: Random, names: NameMaker, kinds: Sequence[str], alias_share: float) -> list[Entity]:
    """Return entities of the given kinds with facts; about half of the names in values are entities of the list."""
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
