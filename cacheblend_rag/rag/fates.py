"""Works out what became of a prompt's tokens."""

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
    """Says what became of one chunk in a prompt.

    Attributes:
        id: The chunk's id.
        fate: ``exact``: its KV was computed in just this context, and used as it is. ``reused``: it was computed in another one,
            and used but for the recomputed tokens. ``recomputed``: all of it was computed anew, what is stored was not used.
            ``missing``: what it takes was not stored, so it was computed.
        start: Its first position in the prompt.
        tokens: How many tokens it has.
    """

    id: str
    fate: Fate
    start: int
    tokens: int


@dataclass(frozen=True)
class PromptFate:
    """Counts what became of a prompt's tokens. The five counts add up to the prompt.

    Attributes:
        exact: Tokens of the exact prefix.
        reused: Other tokens whose stored KV was used as it is.
        recomputed: Tokens of chunks that were computed although the chunk was not missing.
        missing: Tokens of chunks without stored KV.
        text: Tokens between the chunks and behind them: the question, and the conversation before it.
        chunks: One for each chunk, in the order of the prompt.
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
    """Say what became of ``prompt``, which ``engine`` has tokenised and, given the blend options, answered with ``done``."""
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
        if span in stale or exact < span.end <= kept:  # the latter as an earlier turn has left it
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
    """Say whether a chunk is the prompt's first and stands right behind the header."""
    header = tuple(engine.header_ids)
    return span is prompt.spans[0] and span.start == len(header) and prompt.token_ids[: len(header)] == header


def _lacks(engine: BlendEngine, prompt: TokenizedPrompt, done: Generation, span: ChunkSpan) -> bool:
    """Say whether what a chunk takes where it stands was not stored: the same one may stand there twice, first and later."""
    if _begins(engine, prompt, span) and (done.own_missing or engine.writer is not None):
        return bool(done.own_missing)
    return span.chunk.id in done.missing


def _exact_prefix(engine: BlendEngine, prompt: TokenizedPrompt, done: Generation, reuse: Reuse) -> int:
    """Return how many tokens from the first on were used as they are, in the context they were computed in."""
    if reuse in ("off", "prefix"):
        return done.usage.reused_tokens  # without a blend all that is reused is exact
    header = len(engine.header_ids)
    if not prompt.spans or prompt.token_ids[:header] != tuple(engine.header_ids):
        return 0
    first = prompt.spans[0]
    computed = first.chunk.id in done.in_place or _lacks(engine, prompt, done, first)
    exact = _begins(engine, prompt, first) and not computed
    return min(first.end if exact else header, done.usage.reused_tokens)
