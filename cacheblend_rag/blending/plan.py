"""Splits a prompt by its stored KV, and records how its KV was computed, to decide which later prompt may reuse it."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from cacheblend_rag.blending.outcome import ChunkLoad, ChunkOutcome, Fate, Lack, PromptOutcome, Usage
from cacheblend_rag.blending.trace import PLAN, Trace
from cacheblend_rag.store.kv import LayerKV, StoredKV

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import Reuse
    from cacheblend_rag.prompts.chunk import Chunk
    from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt


@dataclass(frozen=True)
class StoredSpan:
    """Holds stored KV for the prompt positions ``start`` (inclusive) to ``end`` (exclusive); no chunk means the header.

    The span leaves out the entry's tokens before ``skip`` and from ``skip + end - start`` on.
    """

    start: int
    end: int
    kv: StoredKV
    chunk: Chunk | None = None
    skip: int = 0

    def layer(self, index: int) -> LayerKV:
        """Read one layer of the span's tokens; raises the same errors as :meth:`StoredKV.layer`."""
        return self.cut(self.kv.layer(index))

    def cut(self, whole: LayerKV) -> LayerKV:
        """Return the span's tokens of ``whole``, a layer of the whole entry."""
        count = self.end - self.start
        if count == whole.k.shape[1]:
            return whole
        return LayerKV(*(t[:, self.skip : self.skip + count] for t in whole))

    def static_deviation(self) -> torch.Tensor | None:
        """Return the static deviation of the span's tokens; see :meth:`StoredKV.static_deviation`."""
        static = self.kv.static_deviation()
        return None if static is None else static[self.skip : self.skip + self.end - self.start]

    @property
    def origin(self) -> int:
        """Return the position of the entry's first token in the prompt."""
        return self.start - self.skip

    def within(self, start: int, end: int) -> StoredSpan | None:
        """Return the part of the span between two positions, or None if the part is empty."""
        low, high = max(start, self.start), min(end, self.end)
        if (low, high) == (self.start, self.end):
            return self
        return replace(self, start=low, end=high, skip=self.skip + low - self.start) if low < high else None


def counted(spans: Sequence[StoredSpan], firsts: Sequence[int]) -> torch.Tensor:
    """Return ``[tokens]``, span after span: each span counts up by one per token from its number in ``firsts``."""
    counts = np.fromiter((span.end - span.start for span in spans), np.int64, len(spans))
    begins = np.array(firsts, np.int64) - (np.cumsum(counts) - counts)
    return torch.from_numpy(np.repeat(begins, counts) + np.arange(counts.sum()))


@dataclass(frozen=True)
class PlannedChunk:
    """Says how one chunk of a prompt gets its KV; see :class:`~cacheblend_rag.blending.outcome.ChunkOutcome`."""

    span: ChunkSpan
    fate: Fate = "recomputed"
    lacks: tuple[Lack, ...] = ()


@dataclass(frozen=True)
class BlendPlan:
    """Says how the positions of a prompt get their KV.

    Attributes:
        num_tokens: Length of the prompt, or of the part of the prompt to fill.
        exact: Spans that form a gap-free prefix computed in exactly this context: used as they are.
        stale: Spans of chunks computed elsewhere: moved, then partly recomputed.
        reason: The plan in words.
        chunks: Every chunk of the prompt, in order.
        start: Positions before ``start`` hold KV already (an engine's own prefix cache).
        start_exact: Whether the KV before ``start`` was computed in exactly this context.
        needs_logits: Whether the last position's logits are wanted, so that it must be computed.
        behind: Number of prompt tokens behind ``num_tokens``, which the engine computes itself.
    """

    num_tokens: int
    exact: tuple[StoredSpan, ...]
    stale: tuple[StoredSpan, ...]
    reason: str
    chunks: tuple[PlannedChunk, ...] = ()
    start: int = 0
    start_exact: bool = True
    needs_logits: bool = True
    behind: int = 0

    @property
    def exact_tokens(self) -> int:
        """Return the length of the exact prefix, including the positions before ``start``."""
        return self.exact[-1].end if self.exact else self.start

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """Return the spans of all stored KV that the plan uses."""
        return (*self.exact, *self.stale)

    def lacking(self, what: Lack) -> tuple[Chunk, ...]:
        """Return the chunks of which the store lacks ``what``."""
        return tuple(each.span.chunk for each in self.chunks if what in each.lacks)

    def record(self, trace: Trace, begin: float) -> None:
        """Record in ``trace`` that planning took from ``begin`` until now, and the exact, stale and missing tokens."""
        exact, stale = (sum(span.end - span.start for span in spans) for spans in (self.exact, self.stale))
        missing = {each.span.chunk.id: len(each.span.chunk.token_ids) for each in self.chunks if each.lacks}
        trace.add("computing", PLAN, begin, exact=exact, stale=stale, missing=sum(missing.values()))

    def within(self, start: int, end: int, start_exact: bool = True) -> BlendPlan:
        """Return the plan for positions ``start`` to ``end`` without logits; earlier positions have KV already."""
        exact, stale = (
            tuple(part for span in spans if (part := span.within(start, end)) is not None)
            for spans in (self.exact, self.stale)
        )
        return replace(
            self,
            num_tokens=end,
            exact=exact,
            stale=stale,
            start=start,
            start_exact=start_exact,
            needs_logits=False,
            behind=self.behind + self.num_tokens - end,
        )

    def behind_kept(self, start: int, start_exact: bool) -> BlendPlan:
        """Return the plan for the positions behind the first ``start`` tokens, whose KV is in the prefix cache."""
        rest = self.within(start, self.num_tokens, start_exact)
        return replace(rest, needs_logits=self.needs_logits, behind=self.behind)

    def without(self, unused: Collection[StoredSpan], reason: str) -> BlendPlan:
        """Return the plan that computes the spans ``unused`` in place, although they are stored."""
        exact, stale = (tuple(s for s in spans if s not in unused) for spans in (self.exact, self.stale))
        if not any(span.chunk is not None for span in (*exact, *stale)):
            exact = ()  # the header alone saves too little
        starts = {span.origin for span in unused}
        chunks = tuple(replace(each, fate="recomputed") if each.span.start in starts else each for each in self.chunks)
        return replace(self, exact=exact, stale=stale, reason=reason, chunks=chunks)

    def after_late(self, entries: Collection[tuple[int, ...]]) -> BlendPlan:
        """Return the plan in which late stored ``entries`` are computed in place, with a reason that states so."""
        late = {chunk for chunk in self.lacking("kv") if chunk.token_ids in entries}
        if not late:
            return self
        chunks = tuple(PlannedChunk(each.span) if each.span.chunk in late else each for each in self.chunks)
        stored = replace(self, chunks=chunks)
        found = len(late) + sum(span.chunk is not None for span in self.spans)
        every = found + len(stored.lacking("kv"))
        reason = f"stored KV for {found} of {every} chunks, {len(late)} of them too late and computed in place"
        return replace(stored, reason=reason)

    @property
    def stored_tokens(self) -> int:
        """Return the number of tokens whose stored KV is used."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def candidates(self) -> tuple[StoredSpan, ...]:
        """Return the spans that may be recomputed: the stale spans, without the last token if its logits are wanted."""
        last = self.num_tokens - self.needs_logits
        return tuple(part for span in self.stale if (part := span.within(0, last)) is not None)

    def static_deviation(self) -> torch.Tensor | None:
        """Return the static deviations of all :attr:`candidates`, one after another; None if a chunk has none."""
        return joined_static([span.static_deviation() for span in self.candidates])

    @property
    def uses_stored_kv(self) -> bool:
        """Return whether the plan uses any stored KV."""
        return bool(self.exact or self.stale)

    def outcome(
        self,
        computed: int = 0,
        recomputed: Sequence[int] = (),
        selection: float = 0.0,
        loads: Mapping[int, ChunkLoad] = MappingProxyType({}),
        unranked: bool = False,
    ) -> PromptOutcome:
        """Return the prompt's outcome, as far as the plan and the work done for it determine the outcome.

        Args:
            computed: Number of computed tokens.
            recomputed: Recomputed positions, ascending.
            selection: Cost of the selection; see :class:`Usage`.
            loads: Loads of the spans, by :attr:`StoredSpan.origin`.
            unranked: Whether static deviations were needed and a stale chunk had none.
        """
        exact = self.start * self.start_exact + sum(span.end - span.start for span in self.exact)
        usage = Usage(
            self.num_tokens,
            self.num_tokens - computed,
            len(recomputed),
            computed,
            selection_tokens=selection,
            kept_tokens=self.start,
            exact_tokens=exact,
        )
        stale = {span.origin for span in self.stale} if unranked else set()
        header = next((loads.get(span.origin) for span in self.exact if span.chunk is None), None)
        return PromptOutcome(
            mode="blend" if self.uses_stored_kv else "prefill",
            reason=self.reason,
            usage=usage,
            chunks=tuple(self._outcome_of(each, recomputed, loads, each.span.start in stale) for each in self.chunks),
            header=header,
        )

    def _outcome_of(
        self, planned: PlannedChunk, recomputed: Sequence[int], loads: Mapping[int, ChunkLoad], unranked: bool
    ) -> ChunkOutcome:
        start, end, fate = planned.span.start, planned.span.end, planned.fate
        if end <= self.start:
            fate = "exact" if self.start_exact else "reused"
        if fate in ("missing", "recomputed"):
            computed = end - max(start, self.start)
        else:
            computed = bisect_left(recomputed, end) - bisect_left(recomputed, start)
        lacks: tuple[Lack, ...] = (*planned.lacks, "static") if unranked else planned.lacks
        return ChunkOutcome(planned.span.chunk.id, start, end - start, fate, computed, lacks, loads.get(start))


def joined_static(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the static deviations of several chunks, one after another; None if a chunk has none."""
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
    """Look up the stored KV for ``prompt`` and return the plan.

    The exact prefix is the header, if the prompt starts with it, and the first chunk, if it stands right behind the
    header it was computed behind. At least the last token is always computed, for its logits.

    Args:
        prompt: The tokenised prompt.
        header_ids: Token ids of the header that chunks are precomputed behind.
        lookup: Returns the stored KV of a chunk's token ids; ``()`` stands for the header's own KV.
        reuse: See :class:`~cacheblend_rag.blending.settings.BlendSettings`.
        longest: Length up to which prompts are blended; longer prompts are computed. None for no limit.
        own: Like ``lookup``, for the chunk right behind the header if a KV writer has written the other chunks; None to
            use ``lookup`` for every chunk.
        agree: Returns whether a condition holds on every tensor-parallel rank.
    """
    num_tokens, header = len(prompt.token_ids), len(header_ids)
    starts_with_header = prompt.token_ids[:header] == tuple(header_ids) and header < num_tokens
    chunks = [PlannedChunk(span) for span in prompt.spans]
    if (why := _why_not_looked_up(prompt, header if starts_with_header else None, reuse, longest)) is not None:
        return BlendPlan(num_tokens, (), (), why, tuple(chunks))
    exact: list[StoredSpan] = []
    stale: list[StoredSpan] = []
    kv = lookup(()) if header and starts_with_header else None
    # If text follows the header, inexact KV would also serve prompts that are not blended: up to the first chunk, every
    # prompt relies on exact KV.
    if kv is not None and (prompt.spans[0].start == header or agree(kv.exact)):
        exact.append(StoredSpan(0, header, kv))
    behind_header = starts_with_header and (bool(exact) or not header)
    for index, span in enumerate(prompt.spans):
        begins = index == 0 and starts_with_header and span.start == header
        first = begins and behind_header
        if reuse == "prefix" and not first:
            if begins:  # its header is missing, which is stored together with the chunk
                chunks[0] = PlannedChunk(span, "missing", ("kv",))
            break
        kv = (own if first and own is not None else lookup)(span.chunk.token_ids)
        lacks: tuple[Lack, ...] = ()
        if kv is None:
            lacks = ("own_kv",) if begins and own is not None else ("kv",)
            if "own_kv" in lacks and not (first and (reuse == "prefix" or lookup(span.chunk.token_ids) is not None)):
                lacks = ("kv", "own_kv")
            chunks[index] = PlannedChunk(span, "missing", lacks)
        elif first and span.end < num_tokens:
            exact.append(StoredSpan(span.start, span.end, kv, span.chunk))
            chunks[index] = PlannedChunk(span, "exact")
        else:
            stale.append(StoredSpan(span.start, span.end, kv, span.chunk))
            chunks[index] = PlannedChunk(span, "reused")
    found = len(stale) + sum(s.chunk is not None for s in exact)
    reason = (f"stored KV for {found} of " if found else "no stored KV for any of the ") + f"{len(chunks)} chunks"
    if chunks[0].lacks == ("own_kv",):
        reason += "; the first was computed, since the model's own KV of it was not stored yet"
    used = exact if found else ()  # the header alone saves too little
    return BlendPlan(num_tokens, tuple(used), tuple(stale), reason, tuple(chunks))


def _why_not_looked_up(prompt: TokenizedPrompt, header: int | None, reuse: Reuse, longest: int | None) -> str | None:
    """Return why no KV is looked up for a prompt whose header has ``header`` tokens (None: no header), else None."""
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
    """Marks a position from which on KV may be approximate: from there the chunks of a turn were blended.

    Attributes:
        start: The position.
        key: Hash of the positions of the turn's chunks and of how they were blended.
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

    KV before the first origin is exact. KV behind an origin is the KV of a conversation whose turns were answered one
    after the other. A prompt that continues after an answer has the same origins, followed by the origins of its new
    chunks.

    Args:
        spans: Start and end of each chunk, ascending.
        token_ids: The prompt.
        turn_ends: Positions where earlier prompts of the conversation ended.
        header_tokens: Length of the header that chunks are precomputed behind.
        how: Terms of the blend (:attr:`FuseOptions.terms`).
        watches_question: Whether the turn's other tokens also determine the selection, by their attention.
    """
    found = []
    for turn, members in groupby(spans, lambda span: bisect_right(turn_ends, span[0])):
        inside = list(members)
        # The header and the first chunk come from the store together, which may store them in fewer bits.
        start = 0 if inside[0][0] == header_tokens else inside[0][0]
        end = turn_ends[turn] if turn < len(turn_ends) else len(token_ids)
        key = xxhash.xxh3_128(json.dumps([inside, dict(how)], sort_keys=True).encode())
        if watches_question:
            key.update(array("q", token_ids[start:end]))
        found.append(Origin(start, key.hexdigest()))
    return tuple(found)
