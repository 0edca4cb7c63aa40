"""A seeded generator of fictional documents cut into chunks, and questions about them.

Documents are about people, companies, observatories and ships. A document is cut where the chunk is full, so its later
sentences ("It was founded in 1911.") stand in another chunk than the name they refer to: a chunk's own KV cannot answer
them. Question kinds: "single" (name and fact in one chunk), "cross" (the fact stands in a later chunk than the name),
"two_hop" and "two_hop_cross" (the question names its entity through another one; the latter when a needed fact is a
cross-chunk one), "alias".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from cacheblend_rag.evaluation.datasets.fiction.entities import Entity, draw_kinds, make_entities
from cacheblend_rag.evaluation.datasets.fiction.names import NameMaker
from cacheblend_rag.evaluation.datasets.fiction.phrases import KINDS
from cacheblend_rag.evaluation.datasets.fiction.writer import CountTokens, Sentence, Style, Writer

QUESTION_KINDS: Final = ("single", "cross", "two_hop", "two_hop_cross", "alias")


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
class Context:
    """Consecutive chunks (lists of sentences) and questions about them."""

    chunks: tuple[tuple[Sentence, ...], ...]
    questions: tuple[Question, ...]

    @property
    def chunk_texts(self) -> list[str]:
        """The chunks as text."""
        return ["".join(s.before * (i > 0) + s.text for i, s in enumerate(chunk)) for chunk in self.chunks]


def ask(rng: Random, entities: Sequence[Entity]) -> tuple[list[Question], list[Question]]:
    """Return one-hop and two-hop questions about everything the entities' `where` lists."""
    by_name = {entity.name: entity for entity in entities}
    plain: list[Question] = []
    hops: dict[str, Question] = {}
    for entity in entities:
        for key, (_, named) in entity.where.items():
            attribute, value = KINDS[entity.kind].attributes[key], entity.facts[key]
            template = rng.choice(attribute.questions)
            if entity.alias and entity.alias_in >= 0 and rng.random() < 0.3:
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


def _drop_chunk(rng: Random, writer: Writer, entities: Sequence[Entity]) -> None:
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
        if orphaned or entity.alias_in == gone:
            entity.alias_in = -1


def _write_documents(rng: Random, writer: Writer, entities: Sequence[Entity], filler: float) -> None:
    """Write about one entity after another, with filler in between, until all chunks are full."""
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


def _choose_questions(rng: Random, entities: Sequence[Entity], most: int, two_hop_share: float) -> list[Question]:
    """Draw up to ``most`` questions in random order, cross-chunk ones preferred."""
    plain, hops = ask(rng, entities)
    bonus = {"cross": 0.5, "alias": 0.1, "two_hop_cross": 0.4}
    for group in (plain, hops):
        rng.shuffle(group)
        group.sort(key=lambda question: rng.random() - bonus.get(question.kind, 0.0))
    chosen = (hops[: max(1, int(most * two_hop_share))] + plain)[:most]
    rng.shuffle(chosen)
    return chosen


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
    two_hop_share: float = 0.25,
) -> Context:
    """Draw a context of consecutive chunks and questions about it.

    Args:
        rng: Source of randomness; the same state gives the same context.
        count_tokens: Token count of a text without special tokens; must be additive over sentences.
        chunks: Number of chunks.
        chunk_tokens: Most tokens of a chunk.
        questions: Most questions, cross-chunk ones preferred.
        held_out: Use the names that training never shows.
        unseen_syllables: Build names from syllables that training never shows.
        filler: Share of filler between and inside documents; drawn when None.
        alias_share: Share of entities with a nickname.
        missing_chunk: Leave out one chunk of the run, as a retriever does.
        two_hop_share: Largest share of two-hop questions.

    Returns:
        The context; its questions in random order.
    """
    # Six million parameters tell people of one first name apart nineteen times of twenty, which would hide what blending does.
    names = NameMaker(rng, held_out=held_out, unseen_syllables=unseen_syllables, distinct_first_names=True)
    if filler is None:
        filler = rng.choice([0.1, 0.25, 0.4]) if chunk_tokens >= 100 else rng.choice([0.0, 0.0, 0.2])
    wanted = chunks + missing_chunk
    count = int(wanted * chunk_tokens / (110 if chunk_tokens >= 100 else 60)) + 2
    entities = make_entities(rng, names, draw_kinds(rng, count), alias_share)
    writer = Writer(rng, count_tokens, chunks=wanted, chunk_tokens=chunk_tokens, style=Style(filler))
    _write_documents(rng, writer, entities, filler)
    del writer.chunks[wanted:]
    if missing_chunk:
        _drop_chunk(rng, writer, entities)
    chosen = _choose_questions(rng, entities, questions, two_hop_share)
    return Context(tuple(tuple(chunk) for chunk in writer.chunks if chunk), tuple(chosen))
