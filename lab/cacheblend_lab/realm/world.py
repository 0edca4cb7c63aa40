"""Writes a fictional world from a seed: two articles about each entity, and questions about the entity's facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from cacheblend_lab.fiction.entities import Entity, draw_kinds, make_entities
from cacheblend_lab.fiction.names import NameMaker
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.writer import Sentence, Style, Writer
from cacheblend_lab.realm.passages import Passage, cut
from cacheblend_lab.realm.questions import RealmQuestion

VOLUMES: Final = 2
"""Number of articles about each entity; two articles may state one fact in different words, as in encyclopedias."""

_STYLE: Final = Style(filler=0.1, headings=0.0, long=0.0, short_chunks=0.0, inline=1.0)
_ASKED_LATER: Final = 0.3
_ENDLESS: Final = 1_000_000


@dataclass(frozen=True)
class RealmWorld:
    """Holds a corpus and questions about the corpus.

    Attributes:
        passages: The corpus.
        train: Questions to learn from.
        held_out: Questions about other entities of the corpus.
    """

    passages: list[Passage]
    train: list[RealmQuestion]
    held_out: list[RealmQuestion]


def make_world(seed: int, entities: int, tokenizer: Any, size: int) -> RealmWorld:
    """Write articles about fictional entities, and ask about every fact in them.

    Args:
        seed: Seed of the world; equal seeds give equal worlds.
        entities: Number of entities: people, companies, observatories and ships.
        tokenizer: Counts the word pieces of passages.
        size: Most word pieces of a passage.
    """
    rng = Random(f"realm:{seed}")
    names = NameMaker(rng, held_out=False)
    made = make_entities(rng, names, draw_kinds(rng, entities), 0.0)
    later = set(rng.sample(range(entities), round(_ASKED_LATER * entities)))
    world = RealmWorld([], [], [])
    for number, entity in enumerate(made):
        stated: dict[str, list[int]] = {}
        for _ in range(VOLUMES):
            written = _write(rng, entity)
            title = entity.name.removeprefix("the ")
            begin = len(world.passages)
            world.passages.extend(
                cut(title, "".join(s.before * (i > 0) + s.text for i, s in enumerate(written)), tokenizer, size)
            )
            for sentence in written:
                if sentence.attribute is not None:
                    places = [
                        at for at in range(begin, len(world.passages)) if sentence.text in world.passages[at].text
                    ]
                    stated.setdefault(sentence.attribute, []).extend(places)
        asked = _ask(rng, entity, stated, every=number not in later)
        (world.held_out if number in later else world.train).extend(asked)
    return world


def _write(rng: Random, entity: Entity) -> Sequence[Sentence]:
    writer = Writer(rng, lambda text: len(text.split()), chunks=1, chunk_tokens=_ENDLESS, style=_STYLE)
    writer.write(replace(entity, where={}))
    return writer.chunks[0]


def _ask(rng: Random, entity: Entity, stated: dict[str, list[int]], *, every: bool) -> list[RealmQuestion]:
    """Return one question about each stated fact in a random wording or, with ``every``, in each known wording."""
    found = []
    for key, places in stated.items():
        wordings = KINDS[entity.kind].attributes[key].questions
        for wording in wordings if every else (rng.choice(wordings),):
            text = wording.format(E=entity.name)
            found.append(RealmQuestion(text, (entity.facts[key],), passages=tuple(places), group=entity.name))
    return found
