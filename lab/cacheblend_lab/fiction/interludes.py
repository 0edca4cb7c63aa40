"""Writes the texts between documents: lists, sentences about nicknamed entities, and the units of numbers.

The wording does not show that a sentence depends on another chunk: a list's row is only a name and a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Final

from cacheblend_lab.fiction.asides import UNITS
from cacheblend_lab.fiction.entities import Entity
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.writer import Writer

_ROW_TOKENS: Final = 9
"""Approximate number of tokens of a list's row."""
_WAIT_TOKENS: Final = 90
"""Most tokens of filler in front of a list; the filler makes the chunk end within the list."""
_UNIT_SHARE: Final = 0.6


class Interludes:
    """Plans the texts between a context's documents, and writes each text at its planned place.

    Args:
        rng: Source of randomness.
        chunks: Number of chunks of the context.
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
    """Return the kinds of the entities of each group of lists; the size of the context limits the number of groups.

    Args:
        rng: Source of randomness.
        chunks: Number of chunks.
        chunk_tokens: Most tokens of a chunk.
        crowded: Whether to return as many groups as fit, instead of a random number.
    """
    room = chunks * chunk_tokens
    most = sum(room >= least for least in (100, 300, 1000))
    count = most if crowded else rng.choice((0, 1, most)) if most else 0
    size = rng.randint(4, 9) if chunk_tokens >= 100 else rng.randint(2, 3)
    return [[rng.choice(list(KINDS))] * size for _ in range(count)]
