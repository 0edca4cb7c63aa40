"""Works out which tokens of a prompt were reused, and which were computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.prompts.prompt import TokenizedPrompt

Fate = Literal["exact", "reused", "recomputed", "missing"]


@dataclass(frozen=True)
class ChunkFate:
    """Reports whether the KV of one chunk in a prompt was reused or computed.

    Attributes:
        id: The chunk's id.
        fate: ``exact``: the chunk's KV was computed in the same context, and used unchanged. ``reused``: the KV was
            computed in another context, and used except for the recomputed tokens. ``recomputed``: the whole chunk was
            computed anew, and stored KV was not used. ``missing``: the KV that the chunk needs was not stored, so the
            chunk was computed.
        start: First position of the chunk in the prompt.
        tokens: Number of tokens of the chunk.
    """

    id: str
    fate: Fate
    start: int
    tokens: int


@dataclass(frozen=True)
class PromptFate:
    """Counts the reused and the computed tokens of a prompt. The five counts add up to the prompt.

    Attributes:
        exact: Tokens of the exact prefix.
        reused: Other tokens whose stored KV was used unchanged.
        recomputed: Tokens of chunks that were computed although the chunk was not missing.
        missing: Tokens of chunks without stored KV.
        text: Tokens between and behind the chunks: the question, and the conversation before the question.
        chunks: Fate of each chunk, in the order of the prompt.
    """

    exact: int
    reused: int
    recomputed: int
    missing: int
    text: int
    chunks: tuple[ChunkFate, ...]


def prompt_fate(
    engine: BlendEngine, prompt: TokenizedPrompt, done: Generation, settings: BlendSettings | None = None
) -> PromptFate:
    """Return the fate of a prompt that ``engine`` has tokenised and, with the given settings, answered by ``done``."""
    wanted = engine.profile.resolve(settings or BlendSettings(), engine.num_layers)
    header, usage, kept = tuple(engine.header_ids), done.usage, done.usage.kept_tokens
    behind_header = prompt.token_ids[: len(header)] == header
    blended = done.mode == "blend" and wanted.reuse == "chunks"
    # Without a blend, all reused tokens are exact.
    exact = min(usage.reused_tokens, len(header) * behind_header) if blended else usage.reused_tokens
    chunks, computed = [], dict.fromkeys(get_args(Fate), 0)
    for number, span in enumerate(prompt.spans):
        first = number == 0 and behind_header and span.start == len(header)
        # A first chunk needs the model's own KV. The chunk may stand in the prompt again, and needs the writer's there.
        own = first and (done.own_missing or engine.writer is not None)
        missing = bool(done.own_missing) if own else span.chunk.id in done.missing
        whole = missing or span.chunk.id in done.in_place
        if blended and first and not whole:
            exact = min(usage.reused_tokens, span.end)
        fate: Fate
        if exact < span.end <= kept or (blended and span.end > exact and not whole):
            fate = "reused"
        elif missing and span.end > kept:
            fate = "missing"
        else:
            fate = "exact" if span.end <= exact else "recomputed"
        chunks.append(ChunkFate(span.chunk.id, fate, span.start, span.end - span.start))
        computed[fate] += max(0, min(span.end - span.start, span.end - kept))
    recomputed = usage.recomputed_tokens + computed["recomputed"]
    text = usage.computed_tokens - recomputed - computed["missing"]
    return PromptFate(exact, usage.reused_tokens - exact, recomputed, computed["missing"], text, tuple(chunks))
