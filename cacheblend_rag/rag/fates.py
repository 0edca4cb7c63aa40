"""Works out which tokens of a prompt were reused, and which were computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.blending.settings import BlendSettings, Reuse
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt

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
    reuse: Reuse = wanted.reuse if done.mode == "blend" else "off"
    kept = done.usage.kept_tokens
    missing = [span for span in prompt.spans if span.end > kept and _lacks(engine, prompt, done, span)]
    exact = _exact_prefix(engine, prompt, done, reuse)
    behind = max(exact, kept)
    whole = [span for span in prompt.spans if span in missing or span.chunk.id in done.in_place]
    stale = [span for span in prompt.spans if span.end > behind and span not in whole and reuse == "chunks"]
    chunks = []
    for span in prompt.spans:
        fate: Fate = "missing" if span in missing else "exact" if span.end <= exact else "recomputed"
        if span in stale or exact < span.end <= kept:  # second: in the prefix cache
            fate = "reused"
        chunks.append(ChunkFate(span.chunk.id, fate, span.start, span.end - span.start))
    computed = {c.start: min(c.tokens, c.start + c.tokens - kept) for c in chunks}
    counts = {
        name: sum(max(0, computed[c.start]) for c in chunks if c.fate == name) for name in ("missing", "recomputed")
    }
    recomputed = done.usage.recomputed_tokens + counts["recomputed"]
    text = done.usage.computed_tokens - recomputed - counts["missing"]
    reused = done.usage.reused_tokens - exact
    return PromptFate(exact, reused, recomputed, counts["missing"], text, tuple(chunks))


def _begins(engine: BlendEngine, prompt: TokenizedPrompt, span: ChunkSpan) -> bool:
    """Return whether a chunk is the prompt's first chunk and stands right behind the header."""
    header = tuple(engine.header_ids)
    return span is prompt.spans[0] and span.start == len(header) and prompt.token_ids[: len(header)] == header


def _lacks(engine: BlendEngine, prompt: TokenizedPrompt, done: Generation, span: ChunkSpan) -> bool:
    """Return whether the KV that a chunk needs at its place was not stored; a chunk may stand first and later, too."""
    if _begins(engine, prompt, span) and (done.own_missing or engine.writer is not None):
        return bool(done.own_missing)
    return span.chunk.id in done.missing


def _exact_prefix(engine: BlendEngine, prompt: TokenizedPrompt, done: Generation, reuse: Reuse) -> int:
    """Return the number of leading tokens that were used unchanged, in the context in which they were computed."""
    if reuse in ("off", "prefix"):
        return done.usage.reused_tokens  # without a blend, all reused tokens are exact
    header = len(engine.header_ids)
    if not prompt.spans or prompt.token_ids[:header] != tuple(engine.header_ids):
        return 0
    first = prompt.spans[0]
    computed = first.chunk.id in done.in_place or _lacks(engine, prompt, done, first)
    exact = _begins(engine, prompt, first) and not computed
    return min(first.end if exact else header, done.usage.reused_tokens)
