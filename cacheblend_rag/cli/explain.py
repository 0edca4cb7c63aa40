"""Explains how an answer came about: `cacheblend ask --explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.console.output import seconds, size, table

if TYPE_CHECKING:
    from cacheblend_rag.rag.results import RagAnswer

_HEADER = "(header)"


def explain_lines(answer: RagAnswer) -> list[str]:
    """Return where each chunk's KV came from, what the prompt waited for it, and why it was handled so."""
    generation = answer.generation
    loads = {load.chunk_id: load for load in generation.loads}
    rows = [["chunk", "document", "KV from", "read", "reading took"]]
    for chunk_id in (*([""] if "" in loads else []), *(source.id for source in answer.sources)):
        load = loads.get(chunk_id)
        document = next((Path(s.path).name for s in answer.sources if s.id == chunk_id), "-")
        row = [chunk_id[:12] or _HEADER, document]
        if load is None:
            row += [_why_not_loaded(answer, chunk_id), "-", "-"]
        else:
            row += [load.tier, size(load.nbytes), seconds(load.seconds) if load.seconds else "-"]
        rows.append(row)
    lines = [table(rows), "", f"waited for stored KV: {seconds(generation.load_s)}"]
    lines.append(f"why: {generation.reason}")
    if generation.ratio is not None:
        lines.append(f"recomputed: {generation.ratio:.0%} of the candidates, chosen by {generation.policy}")
    if generation.prefill_s is not None:
        lines.append(f"a full prefill was expected to take {seconds(generation.prefill_s)}, as measured here")
    elif generation.mode == "blend":
        lines.append("what a full prefill takes is not known here; `cacheblend store calibrate` measures it")
    return lines


def _why_not_loaded(answer: RagAnswer, chunk_id: str) -> str:
    generation = answer.generation
    if chunk_id in generation.missing:
        return "none, computed"
    if chunk_id in generation.in_place:
        return "computed, which is sooner"
    return "-" if generation.mode == "blend" else "computed"
