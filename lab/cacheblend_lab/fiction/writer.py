"""Writes documents about entities, and the texts between documents, into chunks of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Final

from cacheblend_lab.fiction.entities import Entity, Place, capital, filler_sentence, render
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.words import NICKNAMES, REMARKS, UNIT_NOTES, UNITS

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Sentence:
    """Holds one sentence (or heading) of a chunk.

    Attributes:
        before: Text between the sentence and the previous sentence of the chunk.
        entity: Name of the entity that the sentence is about, None for filler.
        opens_document: Whether a new document begins with the sentence.
        attribute: Key of the attribute that the sentence states, or None.
        nickname: Nickname that the sentence uses for the entity, or None.
        adds: Word of an earlier sentence that the value depends on (a list's topic, or a unit), or None.
    """

    text: str
    before: str = " "
    entity: str | None = None
    value: str | None = None
    opens_document: bool = False
    attribute: str | None = None
    nickname: str | None = None
    adds: str | None = None


@dataclass(frozen=True)
class Style:
    """Holds the style of documents.

    Attributes:
        filler: Share of filler sentences between and inside documents.
        headings: Share of documents with a heading.
        long: Share of long documents if the chunk has room; near a chunk's end most documents are long.
        short_chunks: Share of chunks that end early.
        inline: Share of documents that begin within a paragraph.
        wordy: Whether documents state all facts of the entity, with many remarks in between.
    """

    filler: float = 0.25
    headings: float = 0.3
    long: float = 0.3
    short_chunks: float = 0.1
    inline: float = 0.3
    wordy: bool = False


class Writer:
    """Writes documents into chunks of at most a given number of tokens."""

    def __init__(self, rng: Random, count: CountTokens, *, chunks: int, chunk_tokens: int, style: Style) -> None:
        self._rng = rng
        self._count = count
        self._chunk_tokens = chunk_tokens
        self._style = style
        self._wanted = chunks
        self.chunks: list[list[Sentence]] = [[]]
        self._used = 0
        self._budget = self._new_budget()
        self._unit, self._unit_in = "", -1

    @property
    def full(self) -> bool:
        """Return whether all wanted chunks are written."""
        return len(self.chunks) > self._wanted

    @property
    def left(self) -> float:
        """Return the number of tokens left in the current chunk."""
        return self._budget - self._used

    @property
    def written(self) -> float:
        """Return the number of chunks written so far; the current chunk counts as a fraction."""
        return len(self.chunks) - 1 + self._used / self._budget

    def close_chunk(self) -> None:
        """Begin a new chunk."""
        self.chunks.append([])
        self._used = 0
        self._budget = self._new_budget()

    def fill(self, tokens: float, before: str = " ", kind: str | None = None) -> None:
        """Write about `tokens` tokens of filler, or fewer if the chunk is full; many sentences suit `kind`."""
        while tokens > 5:
            text = filler_sentence(self._rng, kind)
            size = self._count(text)
            if size > tokens + 6 or not self._fits(text, before):
                return
            self._add(Sentence(text, before))
            tokens -= size
            before = " "

    def write(self, entity: Entity) -> None:
        """Write the document of `entity`, and continue in the next chunk when a chunk is full."""
        rng, kind = self._rng, KINDS[entity.kind]
        roomy = self._chunk_tokens >= 100
        # A long document that begins near a chunk's end spreads references over much of the next chunk.
        wordy = self._style.wordy
        near_end = wordy or (roomy and self.left < 0.4 * self._chunk_tokens and rng.random() < 0.9)
        long = near_end or (roomy and rng.random() < self._style.long)
        size = len(kind.attributes)
        keys = rng.sample(list(kind.attributes), rng.randint(size if near_end else 7 if long else 4, size))
        remark_share = rng.choice([0.6, 0.8] if near_end else [0.3, 0.6]) if long else (0.1 if roomy else 0.0)
        aside_share = rng.choice([0.7 if near_end else self._style.filler, 0.7]) if long else 0.0
        paragraph_share = 0.12 if long else 0.02
        break_before = " " if rng.random() < self._style.inline else "\n\n"
        line_break = "\n" if rng.random() < 0.06 else " "
        rename = rng.random() < 0.1
        remarks = rng.sample(REMARKS, len(REMARKS))
        named = False
        if rng.random() < self._style.headings and break_before == "\n\n":
            named = self._introduce(entity, rng.choice(kind.headings), break_before, opens=True)
            break_before = "\n\n" if rng.random() < 0.7 else "\n"
        if not self.full and rng.random() < 0.3:
            named = self._introduce(entity, rng.choice(kind.openings), break_before, opens=not named)
            break_before = " "
        if self.full:
            return
        for position, key in enumerate(keys):
            before = break_before if position == 0 else ("\n\n" if rng.random() < paragraph_share else line_break)
            if not self._state(entity, key, before, known=named or position > 0, rename=rename):
                return
            if entity.alias and entity.alias_in < 0 and rng.random() < 0.5:
                self._give_alias(entity)
            if rng.random() < remark_share and not self._remark(entity, remarks.pop()):
                continue
            if rng.random() < aside_share:
                self.fill(rng.uniform(20, 50) if wordy else rng.uniform(8, 40), kind=entity.kind)

    def count_by(self, unit: str) -> None:
        """Write a note that all following numbers are counted by the `unit`."""
        text = self._rng.choice(UNIT_NOTES).format(u=unit)
        if self._make_room(text, "\n\n"):
            self._add(Sentence(text, "\n\n", opens_document=True))
            self._unit, self._unit_in = unit, len(self.chunks) - 1

    def write_list(self, key: str, entities: Sequence[Entity]) -> None:
        """Write the fact `key` of entities of one kind as a list: a title, then one line per name and value."""
        attribute = KINDS[entities[0].kind].attributes[key]
        title = self._rng.choice(attribute.titles)
        if not self._make_room(title, "\n\n"):
            return
        self._add(Sentence(title, "\n\n", opens_document=True))
        title_in = len(self.chunks) - 1
        for entity in entities:
            text = f"{capital(entity.name.removeprefix('the '))}: {entity.facts[key]}."
            if not self._make_room(text, "\n"):
                return
            self._name(entity)
            row = Sentence(text, "\n", entity.name, entity.facts[key], attribute=key, adds=attribute.topic)
            self._add(row)
            here = len(self.chunks) - 1
            entity.where[key] = Place(here, here, title_in=title_in)

    def mention(self, entity: Entity, key: str) -> None:
        """Write the fact `key` of an entity under the entity's nickname, which an earlier sentence has explained."""
        rng, nickname = self._rng, entity.alias or ""
        before = "\n\n" if rng.random() < 0.5 else " "
        statement = rng.choice(KINDS[entity.kind].attributes[key].statements)
        text = render(statement, entity, nickname, entity.facts[key])
        if self._make_room(text, before):
            self._add_fact(entity, key, text, before, entity.alias_from, opens=True, nickname=nickname)

    def _add_fact(
        self,
        entity: Entity,
        key: str,
        text: str,
        before: str,
        named_in: int,
        *,
        opens: bool = False,
        nickname: str | None = None,
    ) -> None:
        counted = bool(self._unit) and KINDS[entity.kind].attributes[key].pool == "number"
        unit, unit_in = (self._unit, self._unit_in) if counted else ("", None)
        self._add(Sentence(text, before, entity.name, entity.facts[key], opens, key, nickname, unit or None))
        here = len(self.chunks) - 1
        entity.where[key] = Place(here, named_in, nickname is not None, unit_in=unit_in, unit=unit)

    def _make_room(self, text: str, before: str) -> bool:
        """Begin the next chunk if `text` does not fit; return False when the last chunk is full."""
        if not self._fits(text, before):
            self.close_chunk()
        return not self.full

    def _new_budget(self) -> float:
        if self._chunk_tokens >= 100 and self._rng.random() < self._style.short_chunks:
            return self._chunk_tokens * self._rng.uniform(0.3, 0.9)
        return self._chunk_tokens * self._rng.uniform(0.93, 1.0)

    def _fits(self, text: str, before: str) -> bool:
        # Line breaks in front count two tokens. An empty chunk takes any sentence, or a long sentence would never fit.
        return self._used + self._count(text) + (0 if before == " " else 2) <= self._budget or self._used == 0

    def _add(self, sentence: Sentence) -> None:
        breaks = 0 if sentence.before == " " or not self.chunks[-1] else len(sentence.before)
        self.chunks[-1].append(sentence)
        self._used += self._count(sentence.text) + breaks

    def _refer(self, entity: Entity) -> str:
        nouns = KINDS[entity.kind].nouns
        return self._rng.choice(nouns) if nouns and self._rng.random() < 0.4 else entity.pronoun

    def _name(self, entity: Entity) -> None:
        entity.named_in = len(self.chunks) - 1
        if entity.introduced_in < 0:
            entity.introduced_in = entity.named_in

    def _give_alias(self, entity: Entity) -> None:
        text = render(self._rng.choice(NICKNAMES), entity, self._refer(entity), entity.alias or "")
        if self._fits(text, " "):
            self._add(Sentence(text, " ", entity.name, entity.alias))
            entity.alias_in, entity.alias_from = len(self.chunks) - 1, entity.named_in

    def _remark(self, entity: Entity, template: str) -> bool:
        text = render(template, entity, self._refer(entity))
        if not self._fits(text, " "):
            return False
        self._add(Sentence(text, " ", entity.name))
        return True

    def _introduce(self, entity: Entity, template: str, before: str, *, opens: bool) -> bool:
        """Write a heading or an opening sentence; return False when the last chunk is full."""
        text = render(template, entity, entity.name)
        if not self._make_room(text, before):
            return False
        self._name(entity)
        self._add(Sentence(text, before, entity.name, None, opens))
        return True

    def _state(self, entity: Entity, key: str, before: str, *, known: bool, rename: bool) -> bool:
        """Write the fact `key`, with a pronoun or noun for a `known` subject; return False if all chunks are full."""
        rng, attribute, value = self._rng, KINDS[entity.kind].attributes[key], entity.facts[key]
        subject = self._refer(entity) if known else entity.name
        templates = attribute.statements + (attribute.value_first if known else ())
        text = capital(render(rng.choice(templates), entity, subject, value))
        if not self._fits(text, before):
            self.close_chunk()
            if self.full:
                return False
            if rename:
                subject = entity.name
                text = capital(render(rng.choice(attribute.statements), entity, subject, value))
        if subject == entity.name:
            self._name(entity)
        self._add_fact(entity, key, text, before, entity.named_in, opens=not known)
        return True


_ROW_TOKENS: Final = 9
"""Approximate number of tokens of a list's row."""
_WAIT_TOKENS: Final = 90
"""Most tokens of filler in front of a list; the filler makes the chunk end within the list."""
_UNIT_SHARE: Final = 0.6


class Interludes:
    """Plans the texts between a context's documents, and writes each text at its planned place.

    The wording does not show that a sentence depends on another chunk: a list's row is only a name and a value.

    Args:
        groups: Groups of entities of one kind; each group gets two lists, which only their titles distinguish.
        crowded: Whether every context has units and uses most of the known nicknames.
    """

    def __init__(self, rng: Random, chunks: int, groups: Sequence[Sequence[Entity]], *, crowded: bool) -> None:
        self._rng = rng
        lists: list[tuple[float, str, list[Entity]]] = []
        for group in groups:
            for key in rng.choice(_pairs(group[0].kind)):
                # A list begins near a chunk's end, so that most rows are in another chunk than the title.
                lists.append((rng.randrange(chunks) + rng.uniform(0.6, 0.9), key, rng.sample(group, len(group))))
        self._lists = sorted(lists, key=lambda planned: planned[0], reverse=True)
        units = rng.sample(UNITS, rng.randint(1, 2) if crowded or rng.random() < _UNIT_SHARE else 0)
        self._units = sorted(((rng.uniform(0, chunks - 0.5), unit) for unit in units), reverse=True)
        self._mentions = 0.8 if crowded else rng.choice([0.0, 0.5, 0.8])

    def write(self, writer: Writer, entities: Sequence[Entity]) -> None:
        """Write the texts that are due at the writer's current place between two documents.

        Args:
            writer: Writer of the context.
            entities: Entities with documents.
        """
        rng = self._rng
        if self._units and writer.written >= self._units[-1][0]:
            writer.count_by(self._units.pop()[1])
        if rng.random() < self._mentions:
            known = [entity for entity in entities if entity.alias_in >= 0 and self._unsaid(entity)]
            if known and not writer.full:
                # Choose the entity whose nickname was explained first.
                entity = min(known, key=lambda entity: entity.alias_in)
                unsaid = self._unsaid(entity)
                for key in rng.sample(unsaid, min(rng.randint(1, 2), len(unsaid))):
                    if not writer.full:
                        writer.mention(entity, key)
        if self._lists and not writer.full and writer.written >= self._lists[-1][0]:
            _, key, listed = self._lists.pop()
            wait = writer.left - rng.uniform(0.1, 0.6) * _ROW_TOKENS * len(listed) - _ROW_TOKENS
            if 0 < wait < _WAIT_TOKENS:
                writer.fill(wait, "\n\n")
            writer.write_list(key, listed)

    @staticmethod
    def _unsaid(entity: Entity) -> list[str]:
        return [key for key in entity.facts if key not in entity.where]


def _pairs(kind: str) -> list[tuple[str, str]]:
    """Return the pairs of a kind's attributes that can be listed and share a pool of values."""
    attributes = KINDS[kind].attributes
    listed = [key for key, attribute in attributes.items() if attribute.titles]
    return [(a, b) for a, b in combinations(listed, 2) if attributes[a].pool == attributes[b].pool]


def list_kinds(rng: Random, chunks: int, chunk_tokens: int, *, crowded: bool) -> list[list[str]]:
    """Return the kinds of the entities of each group of lists; the size of the context limits the number of groups."""
    room = chunks * chunk_tokens
    most = sum(room >= least for least in (100, 300, 1000))
    count = most if crowded else rng.choice((0, 1, most)) if most else 0
    size = rng.randint(4, 9) if chunk_tokens >= 100 else rng.randint(2, 3)
    return [[rng.choice(list(KINDS))] * size for _ in range(count)]
