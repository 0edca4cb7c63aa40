"""What a prompt is made of, seen from the KV store: exact prefix, reusable chunks, and what must be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend_rag.kv import StoredKV

if TYPE_CHECKING:
    from cacheblend_rag.chunking import Chunk
    from cacheblend_rag.engines.base import Reuse
    from cacheblend_rag.prompt import TokenizedPrompt


@dataclass(frozen=True)
class StoredSpan:
    """Stored KV for the prompt positions ``start`` (inclusive) to ``end`` (exclusive); no chunk means the header."""

    start: int
    end: int
    kv: StoredKV
    chunk: Chunk | None = None


@dataclass(frozen=True)
class BlendPlan:
    """How the positions of a prompt get their KV.

    Attributes:
        num_tokens: Length of the prompt.
        exact: Spans that form a gap-free prefix computed in exactly this context: used as they are.
        stale: Spans of chunks computed elsewhere: moved, then partly recomputed.
        missing: Chunks in the prompt without stored KV: computed in place.
        reason: The plan in words.
    """

    num_tokens: int
    exact: tuple[StoredSpan, ...]
    stale: tuple[StoredSpan, ...]
    missing: tuple[Chunk, ...]
    reason: str

    @property
    def exact_tokens(self) -> int:
        """Length of the exact prefix."""
        return self.exact[-1].end if self.exact else 0

    @property
    def uses_stored_kv(self) -> bool:
        """Whether anything stored is used at all."""
        return bool(self.exact or self.stale)


def make_plan(
    prompt: TokenizedPrompt,
    header_ids: Sequence[int],
    lookup: Callable[[Sequence[int]], StoredKV | None],
    reuse: Reuse = "chunks",
) -> BlendPlan:
    """Look up what the store has for ``prompt``.

    The exact prefix is the header, if the prompt starts with it, and the first chunk, if it stands right behind the
    header it was computed behind. At least the last token is always computed, for its logits.

    Args:
        prompt: The tokenised prompt.
        header_ids: What chunks are precomputed behind.
        lookup: Token ids of a chunk to its stored KV; ``()`` to the header's own.
        reuse: See :class:`~cacheblend_rag.engines.base.BlendSettings`.
    """
    num_tokens = len(prompt.token_ids)
    if reuse == "nothing":
        return BlendPlan(num_tokens, (), (), (), "reuse was switched off")
    exact: list[StoredSpan] = []
    stale: list[StoredSpan] = []
    missing: list[Chunk] = []
    header = len(header_ids)
    starts_with_header = prompt.token_ids[:header] == tuple(header_ids) and header < num_tokens
    if header and starts_with_header and prompt.spans and (kv := lookup(())) is not None:
        exact.append(StoredSpan(0, header, kv))
    behind_header = starts_with_header and (bool(exact) or not header)
    for index, span in enumerate(prompt.spans):
        first = index == 0 and behind_header and span.start == header
        if reuse == "prefix" and not first:
            continue
        kv = lookup(span.chunk.token_ids)
        if kv is None:
            missing.append(span.chunk)
        elif first and span.end < num_tokens:
            exact.append(StoredSpan(span.start, span.end, kv, span.chunk))
        else:
            stale.append(StoredSpan(span.start, span.end, kv, span.chunk))
    found = len(stale) + sum(s.chunk is not None for s in exact)
    if not prompt.spans:
        return BlendPlan(num_tokens, (), (), (), "no known chunk in the prompt")
    if not found:
        return BlendPlan(num_tokens, (), (), tuple(missing), f"no stored KV for any of the {len(prompt.spans)} chunks")
    reason = f"stored KV for {found} of {len(prompt.spans)} chunks"
    return BlendPlan(num_tokens, tuple(exact), tuple(stale), tuple(missing), reason)
