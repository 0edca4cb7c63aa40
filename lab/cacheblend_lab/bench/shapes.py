"""Measures the time to first token over shapes of prompts: no quality may be slower than a prefill with prefix caching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any, Final

from cacheblend_lab.bench.workbench import blend_by
from cacheblend_lab.measure import check_positive, count_rounds, take_turns
from cacheblend_lab.policies import rank_for
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import BlendSettings, Quality
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt

QUALITIES: Final[tuple[Quality, ...]] = ("exact", "high", "fast")
_PREFILL: Final = "prefill"


@dataclass(frozen=True)
class ShapesSettings:
    """Holds the shapes to measure: every front with every number and size of chunks and every question.

    Attributes:
        fronts: Numbers of tokens in front of the first chunk; 0 puts the header there, behind which chunks are stored.
        chunks: Numbers of chunks.
        chunk_tokens: Numbers of tokens in a chunk.
        questions: Numbers of tokens in the question.
        repeat: Timed rounds; every round runs every method once.
        cold: Whether the front is computed, too; otherwise an earlier prompt has left the front in the prefix cache.
        seed: Seed of the random tokens.
    """

    fronts: Sequence[int] = (0, 200, 2000)
    chunks: Sequence[int] = (1, 6, 24)
    chunk_tokens: Sequence[int] = (50, 512)
    questions: Sequence[int] = (10, 200, 2000)
    repeat: int = 3
    cold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for fewer than one round."""
        check_positive(self, "repeat")

    @property
    def longest(self) -> int:
        """Return the number of tokens in the longest prompt, without a header."""
        return max(self.fronts) + max(self.chunks) * max(self.chunk_tokens) + max(self.questions)


def bench_shapes(
    place: Workbench,
    settings: ShapesSettings,
    progress: Callable[[str], None] | None = None,
    measured: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure, and return plain data for JSON; call ``measured`` with each row as soon as its shape is measured.

    ``rows`` has for each shape and quality the median of ``sooner`` (the prefill's time divided by the quality's, in
    each round), the ``mode`` that the engine chose and the reason, and ``work``: tokens that all passes ran, as a share
    of the prefill's. The prefill is the engine's own, with prefix caching, of the same tokens without chunks. A round
    runs every method once; each round starts with another method.
    """
    say = progress or (lambda line: None)
    place.engine.profile = replace(place.engine.profile, always=False)  # the engine's own choice is measured
    rank_for(place.engine, blend_by())
    longest = place.random_chunks(max(settings.chunks), max(settings.chunk_tokens), settings.seed)
    rows = []
    for tokens in settings.chunk_tokens:
        chunks = [Chunk(f"{chunk.id}-{tokens}", "", chunk.token_ids[:tokens]) for chunk in longest]
        say(f"computing the KV of chunks of {tokens} tokens")
        place.engine.precompute(chunks)
        for front, count, question in product(settings.fronts, settings.chunks, settings.questions):
            say(f"{front} tokens in front, {count} × {tokens}, a question of {question}")
            shape = {"front": front, "chunks": count, "chunk_tokens": tokens, "question": question}
            for row in _measure(place, settings, chunks[:count], front, question):
                rows.append({**shape, **row})
                if measured is not None:
                    measured(rows[-1])
    return {**place.head(settings, warmup_rounds=1), "rows": rows}


def _measure(
    place: Workbench, settings: ShapesSettings, chunks: Sequence[Chunk], front: int, question: int
) -> list[dict[str, Any]]:
    whole = place.prompt(chunks, question, settings.seed, place.random_ids(front, settings.seed + 2))
    ids, before = whole.token_ids, whole.spans[0].start
    earlier = TokenizedPrompt((*ids[:before], ids[-1]), ())
    done: dict[str, list[Generation]] = {name: [] for name in (_PREFILL, *QUALITIES)}
    for number, _ in count_rounds(settings.repeat):
        for name in take_turns(list(done), number):
            place.forget()
            if not settings.cold and before > 1:
                _first(place, earlier)
            how = BlendSettings(quality="exact" if name == _PREFILL else name)  # type: ignore[arg-type]
            found = _first(place, TokenizedPrompt(ids, ()) if name == _PREFILL else whole, how)
            if number:
                done[name].append(found)
    return [_row(done[_PREFILL], name, done[name]) for name in QUALITIES]


def _first(place: Workbench, prompt: TokenizedPrompt, how: BlendSettings | None = None) -> Generation:
    return place.engine.generate(prompt, SamplingParams(max_tokens=1), how)


def _row(prefill: Sequence[Generation], quality: str, done: Sequence[Generation]) -> dict[str, Any]:
    sooner = [one.timings.ttft_s / other.timings.ttft_s for one, other in zip(prefill, done, strict=True)]
    last, usual = done[-1], prefill[-1].usage.computed_tokens
    work = (last.usage.computed_tokens + last.usage.selection_tokens) / max(1, usual)
    asked = {"quality": quality, "mode": last.mode, "reason": last.reason}
    return {**asked, "sooner": median(sooner), "rounds": sooner, "work": work, "usage": asdict(last.usage)}
