"""A seeded generator of fictional documents cut into chunks, and questions about them.

Documents are about people, companies, observatories and ships. A document is cut where the chunk is full, so its later
sentences ("It was founded in 1911.") stand in another chunk than the name they refer to: a chunk's own KV cannot answer
them. Question kinds: "single" (name and fact in one chunk), "cross" (the fact stands in a later chunk than the name),
"two_hop" and "two_hop_cross" (the question names its entity through another one; the latter when a needed fact is a
cross-chunk one), "alias".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from cacheblend_rag.demo import words
from cacheblend_rag.demo.names import NameMaker, article
from cacheblend_rag.demo.phrases import FILLER, FILLER_WORDS, KINDS, NICKNAMES, REMARKS, Attribute

QUESTION_KINDS: Final = ("single", "cross", "two_hop", "two_hop_cross", "alias")

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Question:
    """A question, its exact answer and what it depends on.

    Attributes:
        text: The question.
        answer: The answer; a two-hop answer names the entity in between first ("Mira Halwick, Aberport").
        kind: One of `QUESTION_KINDS`.
        entities: Names of the entities that must be found, in order; an alias question has the entity behind the alias.
        alias: The alias the question uses, if any.
    """

    text: str
    answer: str
    kind: str
    entities: tuple[str, ...]
    alias: str | None = None


@dataclass(frozen=True)
class Sentence:
    """One sentence (or heading) of a chunk.

    Attributes:
        text: The sentence.
        before: Text between it and the previous sentence of the same chunk.
        entity: Name of the entity it is about, None for filler.
        value: The value it states, if any.
        opens_document: Whether a new document begins here.
    """

    text: str
    before: str = " "
    entity: str | None = None
    value: str | None = None
    opens_document: bool = False


@dataclass(frozen=True)
class Context:
    """Consecutive chunks (lists of sentences) and questions about them."""

    chunks: tuple[tuple[Sentence, ...], ...]
    questions: tuple[Question, ...]

    @property
    def chunk_texts(self) -> list[str]:
        """The chunks as text."""
        return ["".join(s.before * (i > 0) + s.text for i, s in enumerate(chunk)) for chunk in self.chunks]


@dataclass
class _Entity:
    kind: str
    name: str
    pronoun: str
    alias: str | None = None
    alias_known: bool = False
    introduced_in: int = -1
    named_in: int = -1
    facts: dict[str, str] = field(default_factory=dict)
    where: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Attribute -> (index of the chunk that states it, whether that chunk has the name before it)."""


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def render(template: str, entity_name: str, pronoun: str, subject: str, value: str = "") -> str:
    """Fill a statement template.

    Args:
        template: A template of `phrases`.
        entity_name: Name of the entity as written inside a sentence.
        pronoun: "she", "he" or "it".
        subject: What to call the entity here: its name, its pronoun or a noun ("the firm").
        value: The value to state.
    """
    possessive = {"she": "her", "he": "his", "it": "its"}.get(
        subject, subject + ("'" if subject.endswith("s") else "'s")
    )
    return template.format(
        S=_capital(subject),
        s=subject,
        P=_capital(possessive),
        o={"she": "her", "he": "him"}.get(subject, subject),
        E=entity_name,
        H=_capital(entity_name.removeprefix("the ")),
        v=value,
        a=article(value) if value else "",
    )


def filler_sentence(rng: Random) -> str:
    """Return a sentence that states nothing about any entity."""
    pick = {slot: rng.choice(pool) for slot, pool in FILLER_WORDS.items()}
    for slot in ("place", "adj", "people"):
        pick[slot + "2"] = rng.choice([word for word in FILLER_WORDS[slot] if word != pick[slot]])
    return rng.choice(FILLER).format(**pick, Time=_capital(pick["time"]), People=_capital(pick["people"]))


def _make_entities(rng: Random, names: NameMaker, count: int, alias_share: float) -> list[_Entity]:
    kinds = rng.choices(list(KINDS), weights=[3, 3, 2, 2], k=count)
    if count > 1 and rng.random() < 0.4:
        kinds[1] = kinds[0]
    entities = [_Entity(kind, *names.draw(kind)) for kind in kinds]
    for entity in entities:
        if rng.random() < alias_share:
            entity.alias = names.nickname(entity.kind)
        for key, attribute in KINDS[entity.kind].attributes.items():
            entity.facts[key] = _value(rng, names, attribute, entity, entities)
    return entities


def _value(rng: Random, names: NameMaker, attribute: Attribute, entity: _Entity, entities: Sequence[_Entity]) -> str:
    if attribute.pool in KINDS:
        others = [other.name for other in entities if other.kind == attribute.pool and other is not entity]
        return rng.choice(others) if others and rng.random() < 0.5 else names.draw(attribute.pool)[0]
    if attribute.pool == "town":
        return names.town()
    return rng.choice(words.VALUES[attribute.pool])


class _Writer:
    """Writes documents into chunks of at most a given number of tokens."""

    def __init__(self, rng: Random, count: CountTokens, chunks: int, chunk_tokens: int, filler: float) -> None:
        self._rng = rng
        self._count = count
        self._chunk_tokens = chunk_tokens
        self._filler = filler
        self._wanted = chunks
        self.chunks: list[list[Sentence]] = [[]]
        self._used = 0
        self._budget = self._new_budget()

    @property
    def full(self) -> bool:
        return len(self.chunks) > self._wanted

    @property
    def left(self) -> float:
        return self._budget - self._used

    def _new_budget(self) -> float:
        if self._chunk_tokens >= 100 and self._rng.random() < 0.1:
            return self._chunk_tokens * self._rng.uniform(0.3, 0.9)
        return self._chunk_tokens * self._rng.uniform(0.93, 1.0)

    def fits(self, text: str, before: str) -> bool:
        # Without the two tokens of room a line break in front of the sentence could exceed the budget.
        return self._used + self._count(text) + (0 if before == " " else 2) <= self._budget or self._used == 0

    def add(self, sentence: Sentence) -> None:
        breaks = 0 if sentence.before == " " or not self.chunks[-1] else len(sentence.before)
        self.chunks[-1].append(sentence)
        self._used += self._count(sentence.text) + breaks

    def close_chunk(self) -> None:
        self.chunks.append([])
        self._used = 0
        self._budget = self._new_budget()

    def fill(self, tokens: float, before: str = " ") -> None:
        """Write about `tokens` tokens of filler, as far as they fit."""
        while tokens > 5:
            text = filler_sentence(self._rng)
            size = self._count(text)
            if size > tokens + 6 or not self.fits(text, before):
                return
            self.add(Sentence(text, before))
            tokens -= size
            before = " "

    def write(self, entity: _Entity) -> None:
        """Write the document of `entity`, going on in the next chunk where one is full."""
        rng, kind = self._rng, KINDS[entity.kind]
        roomy = self._chunk_tokens >= 100
        # A long document where the chunk is nearly full spreads references over much of the next chunk.
        long = roomy and rng.random() < (0.85 if self.left < self._chunk_tokens / 2 else 0.3)
        keys = rng.sample(list(kind.attributes), rng.randint(7 if long else 4, len(kind.attributes)))
        remark_share = rng.choice([0.3, 0.6, 0.8]) if long else (0.1 if roomy else 0.0)
        aside_share = rng.choice([self._filler, 0.7]) if long else 0.0
        paragraph_share = 0.12 if long else 0.02
        break_before = "\n\n" if rng.random() < 0.7 else " "
        line_break = "\n" if rng.random() < 0.06 else " "
        rename = rng.random() < 0.1
        named = False
        if rng.random() < 0.3 and break_before == "\n\n":
            named = self._say(entity, rng.choice(kind.headings), entity.name, break_before, opens=True)
            break_before = "\n\n" if rng.random() < 0.7 else "\n"
        if not self.full and rng.random() < 0.3:
            named = self._say(entity, rng.choice(kind.openings), entity.name, break_before, opens=not named)
            break_before = " "
        for position, key in enumerate(keys):
            before = break_before if position == 0 else ("\n\n" if rng.random() < paragraph_share else line_break)
            if not self._state(entity, key, named, before, rename):
                return
            if entity.alias and not entity.alias_known and rng.random() < 0.5:
                text = render(rng.choice(NICKNAMES), entity.name, entity.pronoun, self._refer(entity), entity.alias)
                if self.fits(text, " "):
                    self.add(Sentence(text, " ", entity.name, entity.alias))
                    entity.alias_known = True
            if rng.random() < remark_share and not self._remark(entity):
                continue
            if rng.random() < aside_share:
                self.fill(rng.uniform(8, 40))

    def _refer(self, entity: _Entity) -> str:
        nouns = KINDS[entity.kind].nouns
        return self._rng.choice(nouns) if nouns and self._rng.random() < 0.4 else entity.pronoun

    def _remark(self, entity: _Entity) -> bool:
        text = render(self._rng.choice(REMARKS), entity.name, entity.pronoun, self._refer(entity))
        if not self.fits(text, " "):
            return False
        self.add(Sentence(text, " ", entity.name))
        return True

    def _name(self, entity: _Entity) -> None:
        entity.named_in = len(self.chunks) - 1
        if entity.introduced_in < 0:
            entity.introduced_in = entity.named_in

    def _say(self, entity: _Entity, template: str, subject: str, before: str, *, opens: bool) -> bool:
        text = render(template, entity.name, entity.pronoun, subject)
        if not self.fits(text, before):
            self.close_chunk()
            if self.full:
                return False
        self._name(entity)
        self.add(Sentence(text, before, entity.name, None, opens))
        return True

    def _state(self, entity: _Entity, key: str, named: bool, before: str, rename: bool) -> bool:
        """Write the fact `key`; False when the last chunk is full."""
        rng, attribute, value = self._rng, KINDS[entity.kind].attributes[key], entity.facts[key]
        known = bool(entity.where) or named
        subject = self._refer(entity) if known else entity.name
        templates = attribute.statements + (attribute.value_first if known else ())
        text = _capital(render(rng.choice(templates), entity.name, entity.pronoun, subject, value))
        if not self.fits(text, before):
            self.close_chunk()
            if self.full:
                return False
            if rename:
                subject = entity.name
                text = _capital(render(rng.choice(attribute.statements), entity.name, entity.pronoun, subject, value))
        if subject == entity.name:
            self._name(entity)
        self.add(Sentence(text, before, entity.name, value, not known))
        entity.where[key] = (len(self.chunks) - 1, entity.named_in == len(self.chunks) - 1)
        return True


def _ask(rng: Random, entities: Sequence[_Entity]) -> tuple[list[Question], list[Question]]:
    """Return one-hop and two-hop questions about everything the chunks state."""
    by_name = {entity.name: entity for entity in entities}
    plain: list[Question] = []
    hops: dict[str, Question] = {}
    for entity in entities:
        for key, (_, named) in entity.where.items():
            attribute, value = KINDS[entity.kind].attributes[key], entity.facts[key]
            template = rng.choice(attribute.questions)
            if entity.alias and entity.alias_known and rng.random() < 0.3:
                text = template.format(E=entity.alias)
                plain.append(Question(text, value, "alias", (entity.name,), entity.alias))
            else:
                kind = "single" if named else "cross"
                plain.append(Question(template.format(E=entity.name), value, kind, (entity.name,)))
            target = by_name.get(value)
            if target is None or target is entity or not target.where or not attribute.links:
                continue
            for second in rng.sample(list(target.where), min(2, len(target.where))):
                link = rng.choice(attribute.links).format(E=entity.name)
                text = rng.choice(KINDS[target.kind].attributes[second].questions).format(E=link)
                kind = "two_hop" if named and target.where[second][1] else "two_hop_cross"
                answer = f"{value}, {target.facts[second]}"
                hops[text] = Question(text, answer, kind, (entity.name, value))
    return plain, list(hops.values())


def _drop_chunk(rng: Random, writer: _Writer, entities: Sequence[_Entity]) -> None:
    """Remove one chunk, as retrieval may: what it states, and what refers to a name in it, can no longer be asked."""
    gone = rng.randrange(len(writer.chunks))
    del writer.chunks[gone]
    for entity in entities:
        orphaned = entity.introduced_in == gone
        entity.where = {
            key: (chunk - (chunk > gone), named)
            for key, (chunk, named) in entity.where.items()
            if chunk != gone and (named or not orphaned)
        }
        if orphaned:
            entity.alias_known = False


def sample_context(
    rng: Random,
    count_tokens: CountTokens,
    *,
    chunks: int = 6,
    chunk_tokens: int = 512,
    questions: int = 40,
    held_out: bool = True,
    unseen_syllables: bool = False,
    filler: float | None = None,
    alias_share: float = 0.2,
    missing_chunk: bool = False,
) -> Context:
    """Draw a context of consecutive chunks and questions about it.

    Args:
        rng: Source of randomness; the same state gives the same context.
        count_tokens: Token count of a text without special tokens; must be additive over sentences.
        chunks: Number of chunks.
        chunk_tokens: Most tokens of a chunk.
        questions: Most questions; at most a quarter of them two-hop, cross-chunk ones preferred.
        held_out: Use the names that training never shows.
        unseen_syllables: Build names from syllables that training never shows.
        filler: Share of filler between and inside documents; drawn when None.
        alias_share: Share of entities with a nickname.
        missing_chunk: Leave out one chunk of the run, as a retriever does.

    Returns:
        The context; its questions in random order.
    """
    names = NameMaker(rng, held_out=held_out, unseen_syllables=unseen_syllables)
    if filler is None:
        filler = rng.choice([0.1, 0.25, 0.4]) if chunk_tokens >= 100 else rng.choice([0.0, 0.0, 0.2])
    wanted = chunks + missing_chunk
    count = int(wanted * chunk_tokens / (110 if chunk_tokens >= 100 else 60)) + 2
    entities = _make_entities(rng, names, count, alias_share)
    writer = _Writer(rng, count_tokens, wanted, chunk_tokens, filler)
    for entity in entities:
        if writer.full:
            break
        if filler and rng.random() < 0.6:
            writer.fill(rng.expovariate((1 - filler) / (110 * filler)), "\n\n" if rng.random() < 0.5 else " ")
        if writer.left < 12:
            writer.close_chunk()
        if not writer.full:
            writer.write(entity)
    while not writer.full:
        writer.fill(writer.left, "\n\n")
        writer.close_chunk()
    del writer.chunks[wanted:]
    if missing_chunk:
        _drop_chunk(rng, writer, entities)
    plain, hops = _ask(rng, entities)
    bonus = {"cross": 0.5, "alias": 0.1, "two_hop_cross": 0.4}
    for group in (plain, hops):
        rng.shuffle(group)
        group.sort(key=lambda question: rng.random() - bonus.get(question.kind, 0.0))
    chosen = (hops[: max(1, questions // 4)] + plain)[:questions]
    rng.shuffle(chosen)
    return Context(tuple(tuple(chunk) for chunk in writer.chunks if chunk), tuple(chosen))
