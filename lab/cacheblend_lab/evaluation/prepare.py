"""Makes prompts of samples as the paper does: 512-token chunks, the six nearest to the question (section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cacheblend_lab.samples import EvalCase, Sample
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.prompt import chosen_header_ids, rag_header, rag_prompt, tokenize
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS, split_text
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder

MAX_TOKENS: Final = {"qa": 32, "dialogue": 96, "summary": 256}
"""Maximum number of tokens of an answer, by task."""


@dataclass(frozen=True)
class Preparation:
    """Holds the settings of making prompts.

    Attributes:
        query_encoder: Directory of a model that embeds questions in place of ``embedding``; see
            :meth:`Embedder.asked_by`.
        max_tokens: Maximum number of tokens of an answer; None takes the task's number (:data:`MAX_TOKENS`).
    """

    k: int = 6
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    embedding: str = DEFAULT_EMBEDDING
    max_tokens: int | None = None
    query_encoder: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for sizes below 1."""
        if self.k < 1 or (self.max_tokens is not None and self.max_tokens < 1):
            raise InputError("k and max_tokens must be at least 1.")


def set_header(engine: BlendEngine, samples: Sequence[Sample]) -> None:
    """Make ``engine`` compute chunks behind the header of these samples' prompts, so that the first chunk is exact.

    A model that was trained for separate chunks (blockwise) computes chunks without a header, as in normal use.

    Raises:
        InputError: The samples have different instructions or there are no samples, or the engine's header is fixed.
    """
    text = header_text(engine.tokenizer, samples)
    header = chosen_header_ids(engine.tokenizer, () if engine.profile.blockwise else text)
    if header != engine.header_ids and not isinstance(engine, TransformersEngine):
        raise InputError(
            "This engine computes chunks behind the header it was started with, and these prompts have another; start it "
            "with the header of the data set's instruction."
        )
    engine.header_ids = header


def header_text(tokenizer: Any, samples: Sequence[Sample]) -> str:
    """Return the text before the first chunk of these samples' prompts.

    Raises:
        InputError: The samples have different instructions, or there are no samples.
    """
    instructions = {sample.instruction for sample in samples}
    if len(instructions) != 1:
        raise InputError(
            f"A data set needs one instruction for all of its prompts; this one has {len(instructions)}: "
            "chunks' KV is computed behind it."
        )
    return rag_header(tokenizer, instructions.pop())


class Preparer:
    """Makes cases for one engine. The retrieval model is loaded when it is first needed."""

    def __init__(self, engine: BlendEngine, preparation: Preparation):
        """Use the engine's tokenizer and context window."""
        self._engine, self._how = engine, preparation
        self._embedder: Embedder | None = None
        self._cut: tuple[tuple[str, ...], list[Chunk]] = ((), [])

    def case(self, sample: Sample) -> EvalCase:
        """Return the case of a sample, with its prompt.

        Chunks are in the order of the source, so that references come behind the text they refer to. If there are more
        than ``k`` chunks, those with the least L2 distance to the question are used. Summaries ask for nothing in
        particular, and use the first chunks of all documents in turn. If the prompt exceeds the context window, the
        lowest-ranked chunks are left out.

        Raises:
            PromptTooLongError: Not even one chunk fits.
            InputError: The sample's texts are empty.
        """
        max_tokens = self._how.max_tokens or MAX_TOKENS[sample.task]
        chunks = self._chunks(sample)
        order, similarity = self._rank(sample, chunks)
        ranked = order[: self._how.k]
        room = self._engine.context_window - max_tokens
        for count in range(len(ranked), 0, -1):
            kept = [chunks[i] for i in sorted(ranked[:count])]
            prompt = rag_prompt(self._engine.tokenizer, kept, sample.question, sample.instruction)
            if len(tokenize(prompt, self._engine.tokenizer, self._engine.registry).token_ids) <= room:
                near = None if similarity is None else tuple(similarity[i] for i in sorted(ranked[:count]))
                return EvalCase(sample, kept, prompt, max_tokens, len(ranked) - count, near)
        raise PromptTooLongError(
            f"Sample {sample.id}: one chunk and the question exceed the context window of {self._engine.context_window} tokens "
            f"less {max_tokens} for the answer; use smaller chunks or lower max_tokens."
        )

    def _chunks(self, sample: Sample) -> list[Chunk]:
        if self._cut[0] is sample.texts:
            return self._cut[1]
        tokenizer, size = self._engine.tokenizer, self._how.chunk_tokens
        if sample.packing == "ready":
            chunks = [make_chunk(text, tokenizer) for text in sample.texts]
        elif sample.packing == "pack":
            chunks = [make_chunk(text, tokenizer) for text in _packed(sample.texts, tokenizer, size)]
        elif sample.task == "summary":
            parts = [split_text(text, tokenizer, size) for text in sample.texts]
            # The metadata holds each chunk's document and place, for ranking.
            chunks = [
                Chunk(c.id, c.text, c.token_ids, {"part": at, "text": number})
                for number, part in enumerate(parts)
                for at, c in enumerate(part)
            ]
        else:
            chunks = split_text("\n\n".join(sample.texts), tokenizer, size)
        # Equal texts are one chunk, which is used once.
        chunks = list({chunk.id: chunk for chunk in chunks}.values())
        if not chunks:
            raise InputError(f"Sample {sample.id} has no text to answer from.")
        self._cut = (sample.texts, chunks)
        return chunks

    def _rank(self, sample: Sample, chunks: Sequence[Chunk]) -> tuple[list[int], list[float] | None]:
        """Return the chunks' numbers, best first, and their similarities to the question if these determine the order."""
        everything = list(range(len(chunks)))
        if len(chunks) <= self._how.k:
            return everything, None
        if sample.task == "dialogue":
            return everything, None  # examples are already in random order
        if sample.task == "summary":
            return sorted(everything, key=lambda i: (chunks[i].metadata.get("part", i), i)), None
        if self._embedder is None:
            embedder = Embedder.load(self._how.embedding)
            encoder = self._how.query_encoder
            self._embedder = embedder if encoder is None else embedder.asked_by(encoder)
        question = self._embedder.question(sample.question)
        distances = [
            float(np.linalg.norm(windows - question, axis=1).min())
            for windows in self._embedder.texts([chunk.text for chunk in chunks])
        ]
        # The vectors have unit length, so that the cosine similarity follows from the distance.
        return sorted(everything, key=lambda i: (distances[i], i)), [1 - d * d / 2 for d in distances]


def _packed(texts: Sequence[str], tokenizer: Any, size: int) -> list[str]:
    """Join whole texts, separated by blank lines, into chunks of at most ``size`` tokens; longer texts are left out."""
    chunks: list[str] = []
    current = ""
    for text in texts:
        joined = f"{current}\n\n{text}" if current else text
        if len(make_chunk(joined, tokenizer).token_ids) <= size:
            current = joined
        elif len(make_chunk(text, tokenizer).token_ids) <= size:
            chunks.append(current)
            current = text
    return [chunk for chunk in (*chunks, current) if chunk]
