"""Records retrieved texts until the model is asked, and reports which of the texts stand as chunks in the prompt."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cacheblend_rag.blending.outcome import ChunkOutcome
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.errors import AlteredChunkError, InputError
from cacheblend_rag.frameworks.uses import json_forms, uses_of
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.placing import text_of
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef

Retrieved = tuple[str, ...]
"""Forms of one retrieved text: first the form that the prompt is expected to have, then other acceptable forms."""

_MOST_RUNS = 16384
_MOST_HELD = 1024
_MOST_LOOSE = 32


class RetrievalLog:
    """Records which run retrieved which texts, and returns the texts retrieved for a model's run. Thread-safe.

    Runs form trees, as callbacks and tracers show them: a chain, with a retriever and a model in it. When a run ends,
    its texts become its parent's texts. A model then finds the texts of all runs that contain the model, and concurrent
    requests, each a tree, do not see each other's texts. When the outermost run ends, its texts become *loose*: they
    may belong to any later prompt. The log is bounded: runs that never end, and texts that nobody asks for, are
    dropped, the oldest first.
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[Hashable, Hashable | None] = OrderedDict()
        self._held: dict[Hashable, deque[Retrieved]] = {}
        self._loose: deque[Retrieved] = deque(maxlen=_MOST_LOOSE)
        self._lock = threading.Lock()

    def begin(self, run: Hashable, parent: Hashable | None) -> None:
        """Record that a run has begun."""
        with self._lock:
            self._parents[run] = parent
            if len(self._parents) > _MOST_RUNS:
                self._end(next(iter(self._parents)))

    def end(self, run: Hashable) -> None:
        """Record that a run has ended; an unknown run is ignored."""
        with self._lock:
            self._end(run)

    def note(self, run: Hashable | None, items: Iterable[Retrieved], *, replace: bool = False) -> None:
        """Record the texts that ``run`` has retrieved, in place of the texts that the runs in it have retrieved.

        Args:
            run: The run; a run that is not open counts as no run.
            items: The retrieved texts; an item without a text is left out.
            replace: Whether the items were made from texts retrieved before. The items then replace the texts of the
                nearest run around ``run`` that has texts.
        """
        with self._lock:
            self._held.pop(run, None)
            holder = self._parents.get(run) if replace else None
            while holder is not None and holder not in self._held:
                holder = self._parents.get(holder)
            self._held.pop(holder, None)
            self._hold(run, filter(None, items))

    def of(self, run: Hashable | None) -> list[Retrieved]:
        """Return the texts retrieved for a run: the texts of the run and of all runs around it, nearest run first."""
        found: list[Retrieved] = []
        with self._lock:
            while run is not None:
                found += self._held.get(run, ())
                run = self._parents.get(run)
        return list(dict.fromkeys(found))

    @property
    def loose(self) -> list[Retrieved]:
        """Return the texts that were retrieved lately and belong to no open run, oldest first."""
        with self._lock:
            return list(dict.fromkeys(self._loose))

    def _end(self, run: Hashable) -> None:
        parent = self._parents.pop(run, None)
        if items := self._held.pop(run, None):
            self._hold(parent, items)

    def _hold(self, run: Hashable | None, items: Iterable[Retrieved]) -> None:
        if run is None or run not in self._parents:
            self._loose.extend(items)
        else:
            self._held.setdefault(run, deque(maxlen=_MOST_HELD)).extend(items)


OnMiss = Literal["ignore", "warn", "error"]
"""Reaction to retrieved chunks that do not stand in the prompt: ignore them, log a warning, or raise an error."""

_log = logging.getLogger("cacheblend_rag.misses")


@dataclass(frozen=True)
class RetrievalReport:
    """Reports what became of each chunk that was retrieved for a prompt.

    Attributes:
        places: For the id of each retrieved chunk, the id of the prompt's chunk that holds the text (as the text is, or
            as a JSON string spells the text); None if the prompt has no such chunk.
    """

    places: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def lost(self) -> list[str]:
        """Return the ids of the retrieved chunks that stand in no chunk of the prompt."""
        return [name for name, place in self.places.items() if place is None]

    def answered(self, done: Generation) -> dict[str, Any]:
        """Return the report in the form that answers carry: counts, and the status of each retrieved chunk.

        The status is ``"reused"``, ``"not_stored"`` (the chunk's KV was not stored, and was computed in place) or
        ``"not_reused"``.
        """
        found = {chunk.id: chunk for chunk in done.chunks}
        chunks = [{"id": name, "status": _status(found.get(place or ""))} for name, place in self.places.items()]
        reused, new = (sum(each["status"] == status for each in chunks) for status in ("reused", "not_stored"))
        summary = f"{reused} of {len(chunks)} retrieved chunks reused" if chunks else ""
        if new:
            summary += f", {new} not stored yet"
        return {"summary": summary, "retrieved": len(chunks), "reused": reused, "chunks": chunks}


def _status(chunk: ChunkOutcome | None) -> str:
    if chunk is not None and chunk.fate in ("exact", "reused"):
        return "reused"
    return "not_stored" if chunk is not None and "kv" in chunk.lacks else "not_reused"


def find_retrieved(
    engine: BlendEngine, build: Callable[[], BlendPrompt], log: RetrievalLog, run: Hashable | None, on_miss: OnMiss
) -> tuple[BlendPrompt, RetrievalReport]:
    """Build a prompt, and report which of the texts retrieved for the prompt stand in the prompt's chunks.

    A text that the prompt has inside a JSON string, or in another of its forms, is a chunk of its own: computed the
    first time, reused from then on. ``build`` is called again when the engine has learned such chunks. Without a
    ``run``, or if the run retrieved nothing, texts that were retrieved lately count if the prompt has them.

    Raises:
        AlteredChunkError: A retrieved text is in no chunk of the prompt, and ``on_miss`` is ``"error"``.
    """
    prompt = build()
    retrieved = log.of(run)
    items = retrieved or log.loose
    if not items:
        return prompt, RetrievalReport()
    plain = "\0".join(text_of(part) for part in prompt.segments if not isinstance(part, Chunk | ChunkRef))
    # A text that the engine does not know belongs to another view or engine.
    known = [texts for texts in items if any(chunk_id(text) in engine.registry for text in texts)]
    new = [form for texts in known for form in _forms(texts) if form in plain and chunk_id(form) not in engine.registry]
    if uses_of(engine).register(engine, new):
        # A second rendering, once for each form: the first showed which forms the template and the chain have written.
        prompt = build()
    chunks = sorted((part for part in prompt.segments if isinstance(part, Chunk)), key=lambda chunk: len(chunk.text))
    places = {chunk_id(texts[0]): _place(texts, chunks) for texts in items}
    if not retrieved:
        places = {name: place for name, place in places.items() if place is not None}
    report = RetrievalReport(places)
    if on_miss != "ignore" and report.lost:
        _tell(engine, report, on_miss)
    return prompt, report


def checked_on_miss(value: Any) -> OnMiss:
    """Return a valid ``on_miss``; raise InputError for any other value."""
    if value not in get_args(OnMiss):
        raise InputError(f"on_miss is {value!r}; give one of {', '.join(map(repr, get_args(OnMiss)))}.")
    found: OnMiss = value
    return found


def _forms(texts: Retrieved) -> list[str]:
    """Return the texts, and behind them the texts as JSON strings spell them."""
    return [*texts, *(form for text in texts for form in json_forms(text))]


def _place(texts: Retrieved, chunks: Sequence[Chunk]) -> str | None:
    """Return the id of the first of ``chunks`` that holds one of the forms, or None."""
    return next((chunk.id for form in _forms(texts) for chunk in chunks if form in chunk.text), None)


def _tell(engine: BlendEngine, report: RetrievalReport, on_miss: OnMiss) -> None:
    first = report.lost[0]
    said = (
        f"{len(report.lost)} of {len(report.places)} retrieved chunks cannot be reused, the first of them {first}: the "
        "prompt does not have their text as it was retrieved, or the engine does not know them (wrap the retriever)."
    )
    if on_miss == "error":
        raise AlteredChunkError(f"{said} Hand chunks over as they are, or set on_miss='warn'.", first)
    # Many chains never show all chunks to the model: rerankers, prompts that refine an answer chunk by chunk.
    uses = uses_of(engine)
    _log.log(logging.DEBUG if uses.warned else logging.WARNING, "%s", said)
    uses.warned = True
