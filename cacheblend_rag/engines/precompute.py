"""What of some chunks must be computed, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.prompts.chunk import Chunk


@dataclass(frozen=True)
class PrecomputePlan:
    """Entries to compute, by their token ids.

    Attributes:
        chunks: Token ids of the chunks to compute, and the id to report each under. Equal chunks are computed once.
        header: Whether the header's own entry must be computed, too.
        present: How many are stored already.
        failed: Ids of chunks that cannot be computed, and why.
    """

    chunks: dict[tuple[int, ...], str]
    header: bool
    present: int
    failed: dict[str, str]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """Everything to compute; ``()`` is the header's own entry, which comes first."""
        return [*([()] if self.header else []), *self.chunks]

    def report(self, failed: Mapping[str, str], seconds: float) -> PrecomputeReport:
        """Return what was done, once all but ``failed`` is stored."""
        computed = sum(chunk_id not in failed for chunk_id in self.chunks.values())
        return PrecomputeReport(computed, self.present, sum(map(len, self.chunks)), seconds, dict(failed))


def plan_precompute(
    chunks: Sequence[Chunk],
    entries: Entries,
    context_window: int,
    progress: Callable[[int], None] | None = None,
) -> PrecomputePlan:
    """Look up which of ``chunks`` must be computed; ``progress`` is told of those that need not."""
    failed = {chunk.id: "it has no tokens" for chunk in chunks if not chunk.token_ids}
    wanted: dict[tuple[int, ...], str] = {}
    present: set[tuple[int, ...]] = set()
    for chunk in chunks:
        token_ids = chunk.token_ids
        if not token_ids or token_ids in wanted or token_ids in present:
            continue
        if entries.contains(token_ids):
            present.add(token_ids)
        elif len(entries.header_ids) + len(token_ids) >= context_window:
            failed[chunk.id] = "it does not fit the model's context window"
        else:
            wanted[token_ids] = chunk.id
    if progress is not None and len(chunks) > len(wanted):
        progress(len(chunks) - len(wanted))
    header = bool(entries.header_ids and chunks) and not entries.contains(())
    return PrecomputePlan(wanted, header, len(present), failed)
