"""Writes what stands between documents: lists, sentences about nicknamed entities, the units of numbers.

Nothing in their wording marks that they depend on another chunk: a list's row is a name and a value.
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
"""Tokens of a list's row, about."""
_WAIT_TOKENS: Final = 90
"""Most filler in front of a list, so that a chunk ends within it."""
_UNIT_SHARE: Final = 0.6


class Interludes:
    """Plans what stands between a context's documents, and writes it where it is due.

    Args:
        rng: Source of randomness.
        chunks: Number of chunks of the context.
        groups: Entities of one kind each; two lists are made of each group, which only their titles tell apart.
        crowded: Have units in every context, and use nicknames wherever one is known.
    """

    def __init__(self, rng: Random, chunks: int, groups: Sequence[Sequence[Entity]], *, crowded: bool) -> None:
        self._rng = rng
        lists: list[tuple[float, str, list[Entity]]] = []
        for group in groups:
            for key in rng.choice(_pairs(group[0].kind)):
                # Near a chunk's end, so that the title and most rows are apart.
                lists.append((rng.randrange(chunks) + rng.uniform(0.6, 0.9), key, rng.sample(group, len(group))))
        self._lists = sorted(lists, key=lambda planned: planned[0], reverse=True)
        units = rng.sample(UNITS, rng.randint(1, 2) if crowded or rng.random() < _UNIT_SHARE else 0)
        self._units = sorted(((rng.uniform(0, chunks - 0.5), unit) for unit in units), reverse=True)
        self._mentions = 0.8 if crowded else rng.choice([0.0, 0.5, 0.8])

    def write(self, writer: Writer, entities: Sequence[Entity]) -> None:
        """Write what is due at this place between two documents.

        Args:
            writer: Where to.
            entities: Those with documents.
        """
        rng = self._rng
        if self._units and writer.written >= self._units[-1][0]:
            writer.count_by(self._units.pop()[1])
        if rng.random() < self._mentions:
            known = [entity for entity in entities if entity.alias_in >= 0 and self._unsaid(entity)]
            if known and not writer.full:
                # The one whose nickname was explained longest ago.
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
    """Return the pairs of a kind's attributes that can be listed and have values of one sort."""
    attributes = KINDS[kind].attributes
    listed = [key for key, attribute in attributes.items() if attribute.titles]
    return [(a, b) for a, b in combinations(listed, 2) if attributes[a].pool == attributes[b].pool]


def list_kinds(rng: Random, chunks: int, chunk_tokens: int, *, crowded: bool) -> list[list[str]]:
    """Return the kinds of the entities of each group of lists, as many as a context of this size has room for.

    Args:
        rng: Source of randomness.
        chunks: Number of chunks.
        chunk_tokens: Most tokens of a chunk.
        crowded: Have as many groups as there is room for, instead of some.
    """
    room = chunks * chunk_tokens
    most = sum(room >= least for least in (100, 300, 1000))
    count = most if crowded else rng.choice((0, 1, most)) if most else 0
    size = rng.randint(4, 9) if chunk_tokens >= 100 else rng.randint(2, 3)
    return [[rng.choice(list(KINDS))] * size for _ in range(count)]
