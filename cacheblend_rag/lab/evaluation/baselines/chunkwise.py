"""Asks every chunk on its own: MapReduce and MapRerank without a framework (paper section 7.2, figure 13).

Neither ever lets one chunk see another, which is what they cost in quality; both prefill every chunk anew unless told
otherwise, which is what they cost in time.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, BlendPrompt, rag_prompt

_SCORE = re.compile(r"score\s*:?\s*(\d{1,3})", re.IGNORECASE)
_SCORE_REQUEST = "\nAfter the answer, write 'Score:' and how sure you are of it, from 0 to 100."


@dataclass(frozen=True)
class ChunkwiseAnswer:
    """An answer that took several requests.

    Attributes:
        text: The answer.
        parts: What was answered from each chunk, in their order.
        scores: MapRerank's score of each part, 0 to 100; empty for MapReduce.
        ttft_s: Seconds until the first token a user sees: all requests before the last one, then that one's first token.
        total_s: Seconds of all requests.
        prompt_tokens: Prompt tokens of all requests.
        computed_tokens: Those of them that went through all layers.
        reused_tokens: Those whose stored KV was used.
    """

    text: str
    parts: tuple[str, ...]
    scores: tuple[float, ...]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int


@runtime_checkable
class _ShowsLogits(Protocol):
    on_first_logits: Callable[[torch.Tensor], None] | None


class Chunkwise(ABC):
    """Asks every chunk alone and makes one answer of the answers."""

    name: ClassVar[str]

    def __init__(
        self, engine: BlendEngine, settings: BlendSettings = FULL_RECOMPUTE, instruction: str = DEFAULT_INSTRUCTION
    ):
        """Use ``engine``; ``settings`` say how its requests treat stored KV (the paper's baseline reuses none)."""
        self._engine, self._settings, self._instruction = engine, settings, instruction

    @abstractmethod
    def answer(self, question: str, chunks: Sequence[Chunk], sampling: SamplingParams | None = None) -> ChunkwiseAnswer:
        """Answer ``question`` from ``chunks``.

        Raises:
            InputError: There are no chunks.
            PromptTooLongError: A chunk with the question exceeds the context window.
        """

    def _map(self, question: str, chunks: Sequence[Chunk], sampling: SamplingParams) -> list[Generation]:
        if not chunks:
            raise InputError(f"{type(self).__name__} needs at least one chunk.")
        return [self._generate([chunk], question, sampling) for chunk in chunks]

    def _generate(self, chunks: Sequence[Chunk], question: str, sampling: SamplingParams) -> Generation:
        prompt = rag_prompt(self._engine.tokenizer, chunks, question, self._instruction)
        return self._engine.generate(prompt, sampling, self._settings)


class MapReduce(Chunkwise):
    """Answers from each chunk, then answers once more from those answers."""

    name = "map_reduce"

    def answer(self, question: str, chunks: Sequence[Chunk], sampling: SamplingParams | None = None) -> ChunkwiseAnswer:
        """See :class:`Chunkwise`: one request per chunk and one over their answers."""
        sampling = sampling or SamplingParams()
        found = self._map(question, chunks, sampling)
        parts = tuple(g.text.strip() for g in found)
        last = self._engine.generate(self._reduce_prompt(question, parts), sampling, self._settings)
        return _sum_up(last.text.strip(), parts, (), [*found, last], last)

    def _reduce_prompt(self, question: str, parts: Sequence[str]) -> BlendPrompt:
        notes = "\n".join(f"- {part}" for part in parts if part)
        prompt = rag_prompt(self._engine.tokenizer, (), question, self._instruction)
        head, *rest = prompt.segments
        # The answers are new text every time: they stand where chunks would, as text.
        return BlendPrompt((head, f"{notes}\n\n", *rest))


class MapRerank(Chunkwise):
    """Answers from each chunk with a score of the model's certainty, and keeps the answer of the highest score.

    The score is the probability of the answer's first token where the engine shows it. Elsewhere the model is asked to write a
    score behind its answer; one that writes none gets 0 for that chunk.
    """

    name = "map_rerank"

    def answer(self, question: str, chunks: Sequence[Chunk], sampling: SamplingParams | None = None) -> ChunkwiseAnswer:
        """See :class:`Chunkwise`: one request per chunk; of equal scores the earlier chunk's answer wins."""
        sampling = sampling or SamplingParams()
        if isinstance(self._engine, _ShowsLogits):
            sure: list[float] = []
            self._engine.on_first_logits = lambda logits: sure.append(100 * float(logits.float().softmax(-1).max()))
            try:
                found = self._map(question, chunks, sampling)
            finally:
                self._engine.on_first_logits = None
            scored = [(g.text.strip(), score) for g, score in zip(found, sure, strict=True)]
        else:
            found = self._map(question + _SCORE_REQUEST, chunks, sampling)
            scored = [_split_score(g.text) for g in found]
        parts, scores = tuple(text for text, _ in scored), tuple(score for _, score in scored)
        best = scores.index(max(scores))
        return _sum_up(parts[best], parts, scores, found, None)


def _split_score(text: str) -> tuple[str, float]:
    matches = list(_SCORE.finditer(text))
    if not matches:
        return text.strip(), 0
    return text[: matches[-1].start()].strip(), min(100, int(matches[-1][1]))


def _sum_up(
    text: str,
    parts: tuple[str, ...],
    scores: tuple[float, ...],
    requests: Sequence[Generation],
    last: Generation | None,
) -> ChunkwiseAnswer:
    total = sum(g.timings.total_s for g in requests)
    # Without a last request nothing can be shown before all parts are there.
    ttft = total if last is None else total - last.timings.total_s + last.timings.ttft_s
    return ChunkwiseAnswer(
        text,
        parts,
        scores,
        ttft,
        total,
        sum(g.usage.prompt_tokens for g in requests),
        sum(g.usage.computed_tokens for g in requests),
        sum(g.usage.reused_tokens for g in requests),
    )
