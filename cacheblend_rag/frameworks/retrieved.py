"""Records retrieved texts until the model is asked, finds the texts in the prompt, and reacts to altered texts."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import AlteredChunkError, InputError
from cacheblend_rag.frameworks.uses import renditions, uses_of
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.placing import Piece, text_of
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef
from cacheblend_rag.prompts.registry import MATCH_WINDOW

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


RetrievedStatus = Literal["matched", "not_stored", "altered", "absent", "skipped"]
STATUSES: tuple[RetrievedStatus, ...] = ("matched", "not_stored", "altered", "absent", "skipped")

_SAMPLE, _SAMPLES = 16, 24
_SHARE = 0.1  # share of a text's samples above which the prompt has a part of the text
_CUT = "\n[...]\n"  # stands for a chunk


@dataclass(frozen=True)
class RetrievedFate:
    """Reports what became of one retrieved text.

    Attributes:
        id: Id of the text's chunk.
        status: ``"matched"``: a chunk of the prompt is the whole text, contains it, or is a rendition.
            ``"not_stored"``: the text is matched, but the chunk's KV was not stored, and was computed in place.
            ``"altered"``: the prompt has the text changed or in part, outside chunks. ``"absent"``: the prompt has no
            part of the text. ``"skipped"``: the prompt has the whole text, outside chunks (see ``detail``).
        detail: Why the text was skipped.
        chunk: Id of the matched chunk in the prompt.
    """

    id: str
    status: RetrievedStatus
    detail: str = ""
    chunk: str | None = None


@dataclass(frozen=True)
class RetrievalReport:
    """Reports what became of each text that was retrieved for a prompt."""

    fates: tuple[RetrievedFate, ...] = ()

    @property
    def altered(self) -> list[RetrievedFate]:
        """Return the fates of texts whose KV could not be used because of their formatting."""
        return [fate for fate in self.fates if fate.status == "altered"]

    @property
    def summary(self) -> str:
        """Return the counts in words, or an empty string if nothing was retrieved."""
        words = {"altered": "altered between retriever and model", "not_stored": "not stored yet"}
        counts = [(status, sum(fate.status == status for fate in self.fates)) for status in STATUSES]
        told = [f"{count} {words.get(status, status)}" for status, count in counts if count]
        return ", ".join([f"{len(self.fates)} retrieved", *told]) if self.fates else ""

    def answered(self, missing: Iterable[str]) -> RetrievalReport:
        """Return the report updated with the ids of chunks whose KV turned out to be missing."""
        gone = set(missing)
        return RetrievalReport(
            tuple(replace(fate, status="not_stored") if fate.chunk in gone else fate for fate in self.fates)
        )

    def found(self) -> RetrievalReport:
        """Return the report without absent texts, for texts that may not have been retrieved for this prompt."""
        return RetrievalReport(tuple(fate for fate in self.fates if fate.status != "absent"))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in the form that answers carry."""
        return {
            "summary": self.summary,
            "retrieved": len(self.fates),
            **{status: sum(fate.status == status for fate in self.fates) for status in STATUSES},
            "chunks": [
                {"id": fate.id, "status": fate.status, **({"detail": fate.detail} if fate.detail else {})}
                for fate in self.fates
            ],
        }


def fates_of(items: Sequence[Retrieved], prompt: Sequence[Piece]) -> RetrievalReport:
    """Return the report on retrieved texts, each distinct text once, in a prompt of the given pieces."""
    chunks = [piece for piece in prompt if isinstance(piece, Chunk)]
    # Text inside chunks is left out: a neighbouring chunk may share a passage with a retrieved text.
    plain = _CUT.join(text_of(piece) for piece in prompt if not isinstance(piece, Chunk))
    named = {chunk_id(texts[0]): texts for texts in items if texts[0]}
    fates = {name: _whole(name, texts, chunks, plain) for name, texts in named.items()}
    lost = [name for name, fate in fates.items() if fate is None]
    # A chain may also change the case of a retrieved text.
    folded = plain.casefold() if lost else ""
    forms = {name: [text.casefold() for text in texts] for name, texts in named.items()} if lost else {}
    for name in lost:
        others = _CUT.join(text for other in forms if other != name for text in forms[other])
        found = any(_in_part(text, folded, others) for text in forms[name])
        fates[name] = RetrievedFate(name, "altered" if found else "absent")
    return RetrievalReport(tuple(fate for fate in fates.values() if fate is not None))


def renditions_in(items: Sequence[Retrieved], prompt: Sequence[Piece]) -> list[str]:
    """Return the other forms of the texts, and the renditions of all forms, that the prompt has outside chunks."""
    plain = [text_of(piece) for piece in prompt if not isinstance(piece, Chunk)]
    others = (form for texts in items for form in texts[1:])
    forms = chain(others, (form for texts in items for text in texts for form in renditions(text)))
    return [form for form in forms if any(form in text for text in plain)]


def _whole(name: str, texts: Retrieved, chunks: Sequence[Chunk], plain: str) -> RetrievedFate | None:
    """Return the fate of a text that the prompt has whole, or as a chunk in a rendition; None for any other text."""
    by_text = {chunk.text: chunk.id for chunk in chunks}
    same = (by_text[text] for text in texts if text in by_text)
    within = (chunk.id for chunk in chunks for text in texts if text in chunk.text)
    rendered = (by_text[form] for text in texts for form in renditions(text) if form in by_text)
    held = next(same, None) or next(within, None) or next(rendered, None)
    if held is not None:
        return RetrievedFate(name, "matched", chunk=held)
    skipped = next((text for text in texts if text in plain), None)
    return None if skipped is None else RetrievedFate(name, "skipped", _why_skipped(skipped))


def _in_part(text: str, plain: str, others: str) -> bool:
    """Return whether a text is there changed or cut, by samples that no other text has: many texts begin alike."""
    step = max(1, (len(text) - _SAMPLE) // _SAMPLES)
    samples = [text[at : at + _SAMPLE] for at in range(0, max(1, len(text) - _SAMPLE + 1), step)]
    if not any(sample in plain for sample in samples):  # as for all texts that a reranker has left out: a fast answer
        return False
    own = [sample for sample in samples if sample not in others]
    return sum(sample in plain for sample in own) > _SHARE * len(samples)


def _why_skipped(text: str) -> str:
    if len(text) < MATCH_WINDOW:
        return f"it is shorter than {MATCH_WINDOW} characters, and not looked for"
    return "the engine does not know it, or it spells a special token; wrap the retriever that found it"


OnMiss = Literal["ignore", "warn", "error"]
"""Reaction to retrieved chunks that a formatter has altered: ignore them, log a warning, or raise an error."""

_log = logging.getLogger("cacheblend_rag.misses")


def find_retrieved(
    engine: BlendEngine, build: Callable[[], BlendPrompt], log: RetrievalLog, run: Hashable | None, on_miss: OnMiss
) -> tuple[BlendPrompt, RetrievalReport]:
    """Build a prompt, and report what became of the texts retrieved for the prompt.

    A retrieved text that the prompt has in a rendition (escaped, or with its whitespace closed up) is a chunk of its
    own: computed the first time, reused from then on. ``build`` is called again when the engine has learned such
    chunks. Without a ``run``, or if the run retrieved nothing, texts that were retrieved lately count if the prompt has
    them.

    Raises:
        AlteredChunkError: The prompt has altered chunks, and ``on_miss`` is ``"error"``.
    """
    prompt = build()
    retrieved = log.of(run)
    loose = not retrieved
    if loose:
        # Texts that the engine does not know belong to another view or engine.
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
    """Return a valid ``on_miss``; raise InputError for any other value."""
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
    first = report.altered[0].id
    said = (
        f"{report.summary}. The stored KV of chunk {first} cannot be used: it stands in the prompt changed, or in part."
    )
    if on_miss == "error":
        raise AlteredChunkError(f"{said} Hand chunks over as they are, or set on_miss='warn'.", first)
    _log.warning("%s", said)
