"""Prompts of random tokens in the library's terms and in the reference's, from one description."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.blending.policies import Candidates, SelectionPolicy
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from tests.blending.reference import Part


def random_ids(rng: random.Random, count: int, vocabulary: int = 300) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(count)]


def chunk_of(ids: Sequence[int]) -> Chunk:
    name = "-".join(map(str, ids))
    return Chunk(id=name, text=name, token_ids=tuple(ids))


class Scene:
    """A RAG prompt: header, chunks with gaps between them, question."""

    def __init__(
        self,
        seed: int = 0,
        chunk_tokens: Sequence[int] = (24, 17, 31, 20),
        gap: int = 2,
        question: int = 7,
        header: int = 3,
    ):
        rng = random.Random(seed)
        self.header = random_ids(rng, header)
        self.chunks = [chunk_of(random_ids(rng, n)) for n in chunk_tokens]
        self.gaps = [random_ids(rng, gap) for _ in chunk_tokens]
        self.question = random_ids(rng, question)

    @property
    def prompt(self) -> TokenizedPrompt:
        ids, spans = list(self.header), []
        for chunk, gap in zip(self.chunks, self.gaps, strict=True):
            spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
            ids += [*chunk.token_ids, *gap]
        return TokenizedPrompt((*ids, *self.question), tuple(spans))

    def parts(self, missing: Sequence[int] = (), *, first: str = "exact") -> list[Part]:
        """Describe the same prompt for the reference: header and ``first`` chunk are exact, the others stale or
        missing."""
        out: list[Part] = [Part(self.header, "exact")]
        for index, (chunk, gap) in enumerate(zip(self.chunks, self.gaps, strict=True)):
            kind = "missing" if index in missing else first if index == 0 else "stale"
            out += [Part(list(chunk.token_ids), kind), Part(gap, "text")]
        return [*out, Part(self.question, "text")]


def engine_for(model: Any, scene: Scene, **options: Any) -> Any:
    """Make a transformers engine with the scene's header and without a tokenizer or a prefix cache."""
    from cacheblend_rag.engines.transformers import TransformersEngine

    return TransformersEngine(model, device="cpu", header=scene.header, **{"prefix_cache": 0, **options})


def entries_of(engine: Any, store: Any, scene: Scene) -> list[Any]:
    """Read the entries of the scene's header and chunks from a store, such as one of the engine's tiers."""
    entries = Entries(store, engine.fingerprint, scene.header)
    return [entries.get(ids, engine.num_layers) for ids in ((), *(chunk.token_ids for chunk in scene.chunks))]


class Scored(SelectionPolicy):
    """Takes the tokens of highest given score, ``[candidates]``."""

    name = "scored"

    def __init__(self, scores: torch.Tensor):
        self._scores = scores

    def score(self, candidates: Candidates) -> torch.Tensor:
        return self._scores
