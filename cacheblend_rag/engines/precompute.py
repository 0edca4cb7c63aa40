"""Determines which entries of chunks are missing in a store, so that they can be computed before prompts need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.results import NotStored, PrecomputeReport
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkRegistry


@dataclass(frozen=True)
class PrecomputePlan:
    """Lists the entries to compute, by their token ids.

    Attributes:
        chunks: Token ids of the chunks to compute, with the chunk ids for the report. Equal chunks are computed once.
        token_ids: Token ids of all entries to compute; ``()`` is the header's own entry, which comes first.
        present: Number of chunks that are already stored.
        failed: Ids of chunks that cannot be computed, each with the reason.
        unranked: Token ids of stored chunks whose static deviation must be measured.
        most_ranked: Maximum length in tokens of a chunk that can be ranked; 0 if no chunk is to be ranked.
    """

    chunks: dict[tuple[int, ...], str]
    token_ids: list[tuple[int, ...]]
    present: int
    failed: dict[str, str]
    unranked: list[tuple[int, ...]]
    most_ranked: int


def report_of(plan: PrecomputePlan, failed: Mapping[str, str], seconds: float, rank_s: float = 0.0) -> PrecomputeReport:
    """Return the report of a plan that was carried out for all chunks but the ``failed`` ones."""
    stored = [token_ids for token_ids, chunk_id in plan.chunks.items() if chunk_id not in failed]
    ranked = len(plan.unranked) + sum(len(token_ids) <= plan.most_ranked for token_ids in stored)
    tokens = sum(map(len, plan.chunks))
    return PrecomputeReport(len(stored), plan.present, tokens, seconds, dict(failed), ranked, rank_s)


def plan_precompute(
    chunks: Sequence[Chunk],
    entries: Entries,
    context_window: int,
    progress: Callable[[int], None] | None = None,
    probe_tokens: int | None = None,
    written_behind: int = 0,
) -> PrecomputePlan:
    """Look up which of ``chunks`` must be computed; ``progress`` is called with the number of chunks that need not be.

    Given ``probe_tokens``, the length of the probe in front of a chunk that is ranked, the plan also includes static
    deviations. Chunks of a KV writer are computed behind header and ``written_behind`` tokens.
    """
    room = context_window - len(entries.header_ids) - (written_behind if entries.writer is not None else 0)
    most_ranked = 0 if probe_tokens is None else max(0, room - 1 - probe_tokens)  # vLLM also needs room for an answer
    failed: dict[str, str] = {chunk.id: NotStored.NO_TOKENS for chunk in chunks if not chunk.token_ids}
    wanted: dict[tuple[int, ...], str] = {}
    present: dict[tuple[int, ...], bool] = {}
    for chunk in chunks:
        token_ids = chunk.token_ids
        if not token_ids or token_ids in wanted or token_ids in present:
            continue
        if entries.contains(token_ids):
            # Another namespace's entry is ranked there: ranking here would leave a copy that nobody has registered.
            rankable = len(token_ids) <= most_ranked and entries.owns(token_ids)
            present[token_ids] = not rankable or entries.has_static(token_ids)
        elif len(token_ids) >= room:
            failed[chunk.id] = NotStored.NO_WINDOW
        else:
            wanted[token_ids] = chunk.id
    header = [()] if entries.header_ids and chunks and not entries.contains(()) else []
    if progress is not None and (rest := len(chunks) - len(wanted)):
        progress(rest)
    unranked = [token_ids for token_ids, ranked in present.items() if not ranked]
    return PrecomputePlan(wanted, [*header, *wanted], len(present), failed, unranked, most_ranked)


def drop_forgotten(chunks: Sequence[Chunk], registry: ChunkRegistry, entries: Entries) -> None:
    """Delete the entries of chunks that were forgotten during the computation, since nobody can name them any more."""
    for chunk in chunks:
        if registry.get(chunk.id) is None and not registry.others_have(chunk):
            entries.delete(chunk.token_ids)
