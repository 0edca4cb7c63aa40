"""Generates fictional documents from a seed, cuts the documents into chunks, and generates questions about them.

Documents are about people, companies, observatories and ships. A document is cut when the chunk is full, so a sentence
often depends on another chunk, and KV computed for the sentence's chunk alone does not suffice. Question kinds:

- "single": one chunk holds all that is needed.
- "cross": the fact ("It was founded in 1911.") is in a later chunk than the name it refers to.
- "nickname": the fact's sentence uses a nickname that an earlier chunk explains.
- "table": the fact is a row of a list ("Silver Heron: 1911.") with the title in an earlier chunk.
- "unit": an earlier chunk states the unit of the number in the fact.
- "two_hop", "two_hop_cross": the question names its entity through another; "cross" if a fact needs another chunk.
- "alias": the question uses a nickname.
- "comparison": the question asks which of two years is earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, Final

from cacheblend_lab.fiction.entities import Entity, NameMaker, draw_kinds, make_entities
from cacheblend_lab.fiction.questions import QUESTION_KINDS, USUAL_SHARES, FictionQuestion, Shares, choose_questions
from cacheblend_lab.fiction.writer import CountTokens, Interludes, Sentence, Style, Writer, list_kinds
from cacheblend_lab.samples import Sample
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import encoder_for


@dataclass(frozen=True)
class FictionContext:
    """Holds consecutive chunks (tuples of sentences) and questions about the chunks."""

    chunks: tuple[tuple[Sentence, ...], ...]
    questions: tuple[FictionQuestion, ...]

    @property
    def chunk_texts(self) -> list[str]:
        """Return the text of each chunk."""
        return ["".join(s.before * (i > 0) + s.text for i, s in enumerate(chunk)) for chunk in self.chunks]


def _drop_chunk(rng: Random, writer: Writer, entities: Sequence[Entity]) -> None:
    """Remove a random chunk, as retrieval may; drop its facts, and facts that refer to a name which it introduced."""
    gone = rng.randrange(len(writer.chunks))
    del writer.chunks[gone]
    for entity in entities:
        orphaned = entity.introduced_in == gone
        entity.where = {
            key: replace(
                place, chunk=place.chunk - (place.chunk > gone), named_in=place.named_in - (place.named_in > gone)
            )
            for key, place in entity.where.items()
            if place.chunk != gone and (place.named or not orphaned)
        }
        if orphaned or entity.alias_in == gone:
            entity.alias_in = -1


def _write_documents(
    rng: Random, writer: Writer, entities: Sequence[Entity], filler: float, between: Interludes | None
) -> None:
    """Write the entities' documents in order, with filler and interludes in between, until all chunks are full."""
    for entity in entities:
        if writer.full:
            break
        if filler and rng.random() < 0.6:
            writer.fill(rng.expovariate((1 - filler) / (110 * filler)), "\n\n" if rng.random() < 0.5 else " ")
        if between:
            between.write(writer, entities)
        if writer.left < 12 and not writer.full:
            writer.close_chunk()
        if not writer.full:
            writer.write(entity)
    while not writer.full:
        writer.fill(writer.left, "\n\n")
        writer.close_chunk()


def sample_context(
    rng: Random,
    count_tokens: CountTokens,
    *,
    chunks: int = 6,
    chunk_tokens: int = 512,
    questions: int = 40,
    held_out: bool = True,
    filler: float | None = None,
    alias_share: float = 0.2,
    missing_chunk: bool = False,
    shares: Shares = USUAL_SHARES,
    interludes: bool = False,
    crowded: bool = False,
) -> FictionContext:
    """Draw a context of consecutive chunks, and questions about it in random order.

    Args:
        rng: Source of randomness; equal states give equal contexts.
        count_tokens: Token count of a text without special tokens; must be additive over sentences.
        chunks: Number of chunks.
        chunk_tokens: Most tokens of a chunk.
        questions: Most questions; questions that need another chunk are preferred.
        held_out: Whether to use the names that training never uses.
        filler: Share of filler between and inside documents; drawn at random if None.
        alias_share: Share of entities with a nickname.
        missing_chunk: Whether to leave out one chunk, as a retriever does; not together with `interludes`.
        shares: Shares of kinds of questions.
        interludes: Whether to write lists, units and sentences with nicknames between documents, and to ask about them
            and for comparisons.
        crowded: Whether to write as many interludes as fit, for training.

    Raises:
        InputError: Both `missing_chunk` and `interludes` are set: the missing chunk might hold a list's title or a
            unit.
    """
    if missing_chunk and interludes:
        raise InputError(
            "Ask for missing_chunk or for interludes: what a missing chunk said of lists is not followed up."
        )
    # The model of six million parameters confuses people with one first name one time in twenty, which would hide the
    # effect of blending.
    names = NameMaker(rng, held_out=held_out, distinct_first_names=True)
    if filler is None:
        filler = rng.choice((0.1, 0.25, 0.4) if chunk_tokens >= 100 else (0.0, 0.0, 0.2))
    wanted = chunks + missing_chunk
    count = int(wanted * chunk_tokens / (110 if chunk_tokens >= 100 else 60)) + 2
    grouped = list_kinds(rng, chunks, chunk_tokens, crowded=crowded) if interludes else []
    made = make_entities(
        rng, names, draw_kinds(rng, count) + [kind for group in grouped for kind in group], alias_share
    )
    listed = iter(made[count:])
    groups = [list(islice(listed, len(group))) for group in grouped]
    between = Interludes(rng, wanted, groups, crowded=crowded) if interludes else None
    writer = Writer(rng, count_tokens, chunks=wanted, chunk_tokens=chunk_tokens, style=Style(filler))
    _write_documents(rng, writer, made[:count], filler, between)
    del writer.chunks[wanted:]
    if missing_chunk:
        _drop_chunk(rng, writer, made[:count])
    chosen = choose_questions(rng, made, questions, shares, comparisons=interludes)
    return FictionContext(tuple(tuple(chunk) for chunk in writer.chunks if chunk), tuple(chosen))


KINDS: Final = QUESTION_KINDS
"""Kinds of questions by their dependencies; `fiction.world` describes each kind."""

DEFAULT_KINDS: Final = KINDS[:4]
"""Kinds for contexts of documents alone. With any other kind the contexts have lists, units and nicknames, too."""

# Few questions per context: questions that share chunks are less informative than questions on several contexts.
_PER_CONTEXT: Final = 8
_DRAWN: Final = 40


def demo_samples(
    tokenizer: Any,
    limit: int,
    seed: int,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    chunks: int = 6,
    chunk_tokens: int = 512,
) -> list[Sample]:
    """Return ``limit`` questions, with the kinds in turn, about names that the bundled model's training never used.

    Equal seeds and tokenizers give equal questions.

    Raises:
        InputError: Unknown kinds, or sizes too small to hold questions of all kinds.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise InputError(f"The kinds of demo questions are {', '.join(KINDS)}; {', '.join(unknown) or 'none'} given.")
    encoder = encoder_for(tokenizer)
    rng = Random(f"demo:{seed}:{chunks}:{chunk_tokens}")
    found: list[Sample] = []
    empty = 0
    number = 0
    interludes = not set(kinds) <= set(DEFAULT_KINDS)
    while len(found) < limit:
        context = sample_context(
            rng,
            lambda text: len(encoder.document(text)) if text else 0,
            chunks=chunks,
            # Tokens are counted per sentence; joined sentences may have a few tokens more or fewer.
            chunk_tokens=max(16, chunk_tokens - chunk_tokens // 64),
            questions=_DRAWN,
            held_out=True,
            alias_share=0.35 if interludes else 0.0,
            interludes=interludes,
        )
        number += 1
        # Each context starts with another kind, since there are more kinds than questions per context.
        turn = number % len(kinds) if interludes else 0
        drawn = list(
            _take(
                context, [*kinds[turn:], *kinds[:turn]], f"demo-{seed}-{number}", min(_PER_CONTEXT, limit - len(found))
            )
        )
        empty = 0 if drawn else empty + 1
        if empty > 20:
            raise InputError(
                f"{chunks} chunks of {chunk_tokens} tokens hold no questions of the kinds {', '.join(kinds)}; give more or "
                "larger chunks."
            )
        found += drawn
    return found


def _take(context: FictionContext, kinds: Sequence[str], group: str, count: int) -> Iterator[Sample]:
    texts = tuple(context.chunk_texts)
    pools: dict[str, list[tuple[str, str]]] = {kind: [] for kind in kinds}
    for question in context.questions:
        if question.kind in pools:
            pools[question.kind].append((question.text, question.answer))
    taken = 0
    while taken < count and any(pools.values()):
        for kind in kinds:
            if pools[kind] and taken < count:
                text, answer = pools[kind].pop(0)
                taken += 1
                yield Sample(f"{group}-{taken}", text, (answer,), texts, "ready", "qa", kind, group)
