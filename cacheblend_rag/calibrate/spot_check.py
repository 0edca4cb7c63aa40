"""Asks a few questions about new documents by full recompute and by the blend, and compares the answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from cacheblend_rag.blending.settings import FULL_RECOMPUTE
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.pipeline import RagPipeline

_ANSWER: Final = SamplingParams(max_tokens=16)
_QUESTIONS: Final = 4
_SOURCES: Final = 3
_MOST_S: Final = 20.0
# A small index takes little time, but its questions may always take this long, and the first question up to _MOST_S.
_LEAST_S: Final = 5.0
_SHARE: Final = 0.1
_WORDS: Final = 20


@dataclass(frozen=True)
class SpotCheck:
    """Compares a few blended answers with the answers of full recompute.

    Attributes:
        questions: Number of questions asked.
        same: Number of equal answers, token by token, to their end or for 16 tokens.
        full_s: Seconds to the first token by full recompute, summed over questions.
        blend_s: Seconds to the first token by the blend, summed over questions.
        nothing: Reason why no question was asked; empty if some were.
    """

    questions: int
    same: int
    full_s: float
    blend_s: float
    nothing: str = ""

    @property
    def speedup(self) -> float:
        """Return the time to first token of full recompute divided by the time to first token of the blend."""
        return self.full_s / self.blend_s


def spot_check(pipeline: RagPipeline, tokens: int, seconds: float) -> SpotCheck | None:
    """Ask about chunks all over the index, in a tenth of the indexing time and at most 20 s.

    Args:
        pipeline: The pipeline; its model answers by its defaults.
        tokens: Number of tokens that indexing has computed.
        seconds: Duration of indexing.

    Returns:
        The comparison; None if there is nothing to find out (a calibrated model, a model that is not blended, a model
        on another machine, nothing computed).
    """
    engine = pipeline.engine
    if not tokens or engine.profile.is_calibrated or engine.entries is None or not engine.gate.passed:
        return None
    budget, begin = min(_MOST_S, max(_LEAST_S, _SHARE * seconds)), time.perf_counter()
    asked = same = 0
    full_s = blend_s = 0.0
    nothing = "no question finds two chunks"
    for chunk in _spread(list(pipeline.chunks.chunks())):
        question = _question(chunk)
        prompt, hits, _ = pipeline.prompt(question, pipeline.retrieve(question).hits[:_SOURCES], _ANSWER)
        spent = time.perf_counter() - begin
        expected = spent / asked if asked else len(prompt.token_ids) * seconds / tokens
        if len(hits) < 2:
            continue
        if spent + expected > (budget if asked else _MOST_S):
            nothing = f"one question would take more than {_MOST_S:.0f} s"
            continue
        engine.precompute_first([prompt.spans[0].chunk])  # later prompts would find this KV stored, too
        # The blend runs first, so that warm-up costs do not count in its favour.
        blend = engine.generate(prompt, _ANSWER)
        full = engine.generate(prompt, _ANSWER, FULL_RECOMPUTE)
        asked, same = asked + 1, same + (blend.token_ids == full.token_ids)
        full_s, blend_s = full_s + full.timings.ttft_s, blend_s + blend.timings.ttft_s
    engine.reset_prefix_cache()
    return SpotCheck(asked, same, full_s, blend_s, "" if asked else nothing)


def _spread(chunks: list[Chunk]) -> list[Chunk]:
    """Return a few of ``chunks``, evenly spaced."""
    count = min(_QUESTIONS, len(chunks))
    return [chunks[(2 * number + 1) * len(chunks) // (2 * count)] for number in range(count)]


def _question(chunk: Chunk) -> str:
    """Return a question about the beginning of a chunk: its heading, or the first words of a sentence."""
    lines = (line.strip("#*-=|>` \t") for line in chunk.text.splitlines())
    words = next((line for line in lines if line), chunk.text).split()
    return f"What is said about this: {' '.join(words[:_WORDS])}?"
