"""Generates the `demo` data set from a seed: documents and questions of the bundled model's fictional world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final

from cacheblend_lab.fiction.questions import QUESTION_KINDS
from cacheblend_lab.fiction.world import FictionContext, sample_context
from cacheblend_lab.samples import Sample
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import encoder_for

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
