"""Finds what was retrieved in a prompt that a framework has made, and decides what to do about the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import AlteredChunkError, InputError
from cacheblend_rag.frameworks.altered import RetrievalReport, fates_of, renditions_in
from cacheblend_rag.frameworks.retrieved import RetrievalLog, Retrieved
from cacheblend_rag.frameworks.uses import uses_of
from cacheblend_rag.prompts.chunk import chunk_id
from cacheblend_rag.prompts.placing import Piece
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef

OnMiss = Literal["ignore", "warn", "error"]
"""What to do about retrieved chunks that a formatter has altered: nothing, log a warning, or raise."""

_log = logging.getLogger("cacheblend_rag.misses")


def find_retrieved(
    engine: BlendEngine, build: Callable[[], BlendPrompt], log: RetrievalLog, run: Hashable | None, on_miss: OnMiss
) -> tuple[BlendPrompt, RetrievalReport]:
    """Build a prompt, and say what became in it of what was retrieved for it.

    A retrieved text that stands there in a rendition (escaped, or with its whitespace closed up) is a chunk of its own: computed
    the first time, reused from then on.

    Args:
        engine: What will answer.
        build: Builds the prompt, with the chunks that the engine knows; called again when it has learned some.
        log: What was retrieved.
        run: The run that asks; without one, or where it retrieved nothing, what was retrieved lately counts where it is found.
        on_miss: What to do about altered chunks.

    Raises:
        AlteredChunkError: There are some, and ``on_miss`` is ``"error"``.
    """
    prompt = build()
    retrieved = log.of(run)
    loose = not retrieved
    if loose:
        # Another view's or engine's is none of this one's business.
        retrieved = [texts for texts in log.loose if _known(engine, texts)]
    if not retrieved:
        return prompt, RetrievalReport()
    report = fates_of(retrieved, _pieces(prompt))
    lost = {fate.id for fate in report.fates if fate.status in ("altered", "absent", "skipped")}
    unmatched = [texts for texts in retrieved if chunk_id(texts[0]) in lost and _known(engine, texts)]
    if forms := renditions_in(unmatched, _pieces(prompt)):
        uses_of(engine).register(engine, forms)
        prompt = build()
        report = fates_of(retrieved, _pieces(prompt))
    if loose:
        report = report.found()
    _tell(report, on_miss)
    return prompt, report


def checked_on_miss(value: Any) -> OnMiss:
    """Return what is to be done about misses; raises InputError for anything else."""
    if value not in get_args(OnMiss):
        raise InputError(f"on_miss is {value!r}; give one of {', '.join(map(repr, get_args(OnMiss)))}.")
    found: OnMiss = value
    return found


def _known(engine: BlendEngine, texts: Retrieved) -> bool:
    return any(chunk_id(text) in engine.registry for text in texts)


def _pieces(prompt: BlendPrompt) -> list[Piece]:
    return [segment for segment in prompt.segments if not isinstance(segment, ChunkRef)]


def _tell(report: RetrievalReport, on_miss: OnMiss) -> None:
    if on_miss == "ignore" or not report.altered:
        return
    first = report.altered[0]
    said = f"{report.summary}. The stored KV of chunk {first.id} cannot be used: {first.detail}"
    if on_miss == "error":
        raise AlteredChunkError(
            f"{said}\nHand chunks over as they are, or set on_miss='warn'.", first.id, first.at or 0
        )
    _log.warning("%s", said)
