"""Splits a prompt by what the KV store has, and records how its KV came about: only by this may it serve a later prompt."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.trace import PLAN, Trace
from cacheblend_rag.store.kv import LayerKV, StoredKV

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import Reuse
    from cacheblend_rag.prompts.chunk import Chunk
    from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class StoredSpan:
    """Holds stored KV for the prompt positions ``start`` (inclusive) to ``end`` (exclusive); no chunk means the header.

    The entry's tokens before ``skip`` and behind ``skip + end - start`` are not wanted.
    """

    start: int
    end: int
    kv: StoredKV
    chunk: Chunk | None = None
    skip: int = 0

    def layer(self, index: int) -> LayerKV:
        """Read one layer of the wanted tokens; raises as :meth:`StoredKV.layer` does."""
        return self.cut(self.kv.layer(index))

    def cut(self, whole: LayerKV) -> LayerKV:
        """Return the wanted tokens of a layer of the whole entry."""
        count = self.end - self.start
        if count == whole.k.shape[1]:
            return whole
        return LayerKV(*(t[:, self.skip : self.skip + count] for t in whole))

    def static_deviation(self) -> torch.Tensor | None:
        """Return that of the wanted tokens; see :meth:`StoredKV.static_deviation`."""
        static = self.kv.static_deviation()
        return None if static is None else static[self.skip : self.skip + self.end - self.start]

    def within(self, start: int, end: int) -> StoredSpan | None:
        """Return the part between two positions, or None if there is none."""
        low, high = max(start, self.start), min(end, self.end)
        if (low, high) == (self.start, self.end):
            return self
        return replace(self, start=low, end=high, skip=self.skip + low - self.start) if low < high else None


def counted(spans: Sequence[StoredSpan], firsts: Sequence[int]) -> torch.Tensor:
    """Return ``firsts``, a number for each span's first token, counted on within the span: ``[tokens]``, span after span."""
    counts = np.fromiter((span.end - span.start for span in spans), np.int64, len(spans))
    begins = np.array(firsts, np.int64) - (np.cumsum(counts) - counts)
    return torch.from_numpy(np.repeat(begins, counts) + np.arange(counts.sum()))


@dataclass(frozen=True)
class BlendPlan:
    """Says how the positions of a prompt get their KV.

    Attributes:
        num_tokens: Length of the prompt, or of the part of it that is to be filled.
        exact: Spans that form a gap-free prefix computed in exactly this context: used as they are.
        stale: Spans of chunks computed elsewhere: moved, then partly recomputed.
        missing: Chunks in the prompt without stored KV: computed in place.
        in_place: Chunks with stored KV that are computed in place all the same, since that is sooner.
        own_missing: The first chunk, where it would be exact if the model's own KV of it were stored beside a KV writer's.
        reason: The plan in words.
        start: Positions before it hold KV already (an engine's own prefix cache).
        needs_logits: Whether the last position's logits are wanted, so that it must be computed.
        behind: Tokens of the prompt behind ``num_tokens``, which the engine computes itself.
    """

    num_tokens: int
    exact: tuple[StoredSpan, ...]
    stale: tuple[StoredSpan, ...]
    missing: tuple[Chunk, ...]
    reason: str
    start: int = 0
    needs_logits: bool = True
    behind: int = 0
    in_place: tuple[Chunk, ...] = ()
    own_missing: tuple[Chunk, ...] = ()

    @property
    def exact_tokens(self) -> int:
        """Return the length of the exact prefix, with what is there already."""
        return self.exact[-1].end if self.exact else self.start

    def tell(self, trace: Trace, begin: float) -> None:
        """Tell a trace that this was planned from ``begin`` until now, and how many tokens have KV of which kind."""
        exact, stale = (sum(span.end - span.start for span in spans) for spans in (self.exact, self.stale))
        missing = {chunk.id: len(chunk.token_ids) for chunk in (*self.missing, *self.own_missing)}
        trace.add("computing", PLAN, begin, exact=exact, stale=stale, missing=sum(missing.values()))

    def within(self, start: int, end: int) -> BlendPlan:
        """Return the plan for the positions ``start`` to ``end`` alone, the former ones there already, without logits."""
        exact, stale = (
            tuple(part for span in spans if (part := span.within(start, end)) is not None)
            for spans in (self.exact, self.stale)
        )
        behind = self.behind + self.num_tokens - end
        return replace(self, num_tokens=end, exact=exact, stale=stale, start=start, needs_logits=False, behind=behind)

    def behind_kept(self, start: int) -> BlendPlan:
        """Return the plan for what stands behind the first ``start`` tokens, whose KV is there already."""
        return replace(self.within(start, self.num_tokens), needs_logits=self.needs_logits, behind=self.behind)

    def without(self, unused: Collection[StoredSpan], reason: str) -> BlendPlan:
        """Return the plan that computes the spans ``unused`` in place, although they are stored."""
        exact, stale = (tuple(s for s in spans if s not in unused) for spans in (self.exact, self.stale))
        if not any(span.chunk is not None for span in (*exact, *stale)):
            exact = ()  # the header alone is not worth it
        in_place = tuple(span.chunk for span in unused if span.chunk is not None)
        return replace(self, exact=exact, stale=stale, reason=reason, in_place=(*self.in_place, *in_place))

    def after_late(self, entries: Collection[tuple[int, ...]]) -> BlendPlan:
        """Return a plan in which stored ``entries`` were left out since they came too late, and that says so."""
        late = tuple(chunk for chunk in self.missing if chunk.token_ids in entries)
        if not late:
            return self
        missing, own = (tuple(c for c in each if c not in late) for each in (self.missing, self.own_missing))
        found = len(late) + sum(span.chunk is not None for span in (*self.exact, *self.stale))
        reason = f"stored KV for {found} of {found + len(missing)} chunks, {len(late)} of them too late and computed in place"
        return replace(self, missing=missing, own_missing=own, in_place=(*self.in_place, *late), reason=reason)

    @property
    def stored_tokens(self) -> int:
        """Return the number of tokens whose stored KV is used."""
        return sum(span.end - span.start for span in (*self.exact, *self.stale))

    @property
    def candidates(self) -> tuple[StoredSpan, ...]:
        """Return what may be recomputed: the stale spans, but for the last token where its logits are wanted."""
        last = self.num_tokens - self.needs_logits
        return tuple(part for span in self.stale if (part := span.within(0, last)) is not None)

    def static_deviation(self) -> torch.Tensor | None:
        """Return the static deviation of all :attr:`candidates`, one behind the other; None where a chunk has none."""
        return joined_static([span.static_deviation() for span in self.candidates])

    @property
    def uses_stored_kv(self) -> bool:
        """Return whether anything stored is used at all."""
        return bool(self.exact or self.stale)

    def outcome(self, computed: int = 0, recomputed: int = 0, selection: float = 0.0) -> PromptOutcome:
        """Return what became of the prompt, as far as the plan and how many tokens were computed tell."""
        return PromptOutcome(
            mode="blend" if self.uses_stored_kv else "prefill",
            reason=self.reason,
            usage=Usage(self.num_tokens, self.num_tokens - computed, recomputed, computed, 0, selection, self.start),
            missing=tuple(chunk.id for chunk in self.missing),
            in_place=tuple(chunk.id for chunk in self.in_place),
            own_missing=tuple(chunk.id for chunk in self.own_missing),
        )


def joined_static(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the static deviations of several chunks, one behind the other; None where one has none."""
    known = [part for part in parts if part is not None]
    return torch.cat([torch.zeros(0), *known]) if len(known) == len(parts) else None


def make_plan(
    prompt: TokenizedPrompt,
    header_ids: Sequence[int],
    lookup: Callable[[Sequence[int]], StoredKV | None],
    reuse: Reuse = "chunks",
    longest: int | None = None,
    own: Callable[[Sequence[int]], StoredKV | None] | None = None,
    agree: Callable[[bool], bool] = bool,
) -> BlendPlan:
    """Look up what the store has for ``prompt``.

    The exact prefix is the header, if the prompt starts with it, and the first chunk, if it stands right behind the
    header it was computed behind. At least the last token is always computed, for its logits.

    Args:
        prompt: The tokenised prompt.
        header_ids: What chunks are precomputed behind.
        lookup: Token ids of a chunk to its stored KV; ``()`` to the header's own.
        reuse: See :class:`~cacheblend_rag.blending.settings.BlendSettings`.
        longest: Longer prompts are computed; None: there are none.
        own: The same for the chunk behind the header, where a KV writer has written the others; None: as the others.
        agree: Says whether something holds on every tensor-parallel rank.
    """
    num_tokens, header = len(prompt.token_ids), len(header_ids)
    starts_with_header = prompt.token_ids[:header] == tuple(header_ids) and header < num_tokens
    if (why := _why_not_looked_up(prompt, header if starts_with_header else None, reuse, longest)) is not None:
        return BlendPlan(num_tokens, (), (), (), why)
    exact: list[StoredSpan] = []
    stale: list[StoredSpan] = []
    missing: list[Chunk] = []
    own_missing: tuple[Chunk, ...] = ()
    kv = lookup(()) if header and starts_with_header else None
    # In front of text, what is not exact would serve prompts that are not blended: up to the first chunk KV is exact to all.
    if kv is not None and (prompt.spans[0].start == header or agree(kv.exact)):
        exact.append(StoredSpan(0, header, kv))
    behind_header = starts_with_header and (bool(exact) or not header)
    for index, span in enumerate(prompt.spans):
        begins = index == 0 and starts_with_header and span.start == header
        first = begins and behind_header
        if reuse == "prefix" and not first:
            missing += [span.chunk] if begins else []  # what lacks is its header, which is stored along
            break
        kv = (own if first and own is not None else lookup)(span.chunk.token_ids)
        if kv is None and begins and own is not None:
            own_missing = (span.chunk,)
            if first and (reuse == "prefix" or lookup(span.chunk.token_ids) is not None):
                continue
        if kv is None:
            missing.append(span.chunk)
        elif first and span.end < num_tokens:
            exact.append(StoredSpan(span.start, span.end, kv, span.chunk))
        else:
            stale.append(StoredSpan(span.start, span.end, kv, span.chunk))
    found = len(stale) + sum(s.chunk is not None for s in exact)
    reason = (f"stored KV for {found} of " if found else "no stored KV for any of the ") + f"{len(prompt.spans)} chunks"
    if own_missing and own_missing[0] not in missing:
        reason += "; the first was computed, since the model's own KV of it was not stored yet"
    used = exact if found else ()  # the header alone is not worth it
    return BlendPlan(num_tokens, tuple(used), tuple(stale), tuple(missing), reason, own_missing=own_missing)


def _why_not_looked_up(prompt: TokenizedPrompt, header: int | None, reuse: Reuse, longest: int | None) -> str | None:
    """Return why nothing is looked up for a prompt that begins with a header of so many tokens, or with none; else None."""
    if longest is not None and len(prompt.token_ids) > longest:
        return f"this model's attention is cut after {longest} tokens, and the prompt is longer"
    if reuse == "off":
        return "reuse was switched off"
    if not prompt.spans:
        return "no known chunk in the prompt"
    if reuse == "prefix" and prompt.spans[0].start != header:
        return "exact reuse takes a chunk right behind the header, and none stands there"
    return None


@dataclass(frozen=True)
class Origin:
    """Marks a position from which on KV may be approximate: the chunks of a turn were blended there.

    Attributes:
        start: The position.
        key: Hash of where the turn's chunks are and how they were blended.
    """

    start: int
    key: str


def origins(
    spans: Sequence[tuple[int, int]],
    token_ids: Sequence[int],
    turn_ends: Sequence[int],
    header_tokens: int,
    how: Mapping[str, Any],
    watches_question: bool,
) -> tuple[Origin, ...]:
    """Return a prompt's origins, ascending: one for each turn that has chunks.

    Before the first of them KV is exact. Behind each it is that of a conversation whose turns were answered one after the
    other: a prompt that goes on from an answer has the same origins, and those of its new chunks behind them.

    Args:
        spans: Start and end of each chunk, ascending.
        token_ids: The prompt.
        turn_ends: Where earlier prompts of the conversation ended.
        header_tokens: Length of what chunks are precomputed behind.
        how: What :func:`blend_terms` returns.
        watches_question: Whether the turn's other tokens do, too: where their attention selects.
    """
    found = []
    for turn, members in groupby(spans, lambda span: bisect_right(turn_ends, span[0])):
        inside = list(members)
        # Header and first chunk come from the store together, which may keep them in fewer bits.
        start = 0 if inside[0][0] == header_tokens else inside[0][0]
        end = turn_ends[turn] if turn < len(turn_ends) else len(token_ids)
        key = xxhash.xxh3_128(json.dumps([inside, dict(how)], sort_keys=True).encode())
        if watches_question:
            key.update(array("q", token_ids[start:end]))
        found.append(Origin(start, key.hexdigest()))
    return tuple(found)
