"""Plans an indexing run: which documents must be indexed, and how much KV each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.printable import in_one_line, size
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.chunking import split_document
from cacheblend_rag.retrieval.database import IndexConfig
from cacheblend_rag.retrieval.documents import Document, SkippedDocument, load_document
from cacheblend_rag.store import EntryFormat
from cacheblend_rag.store.base import stats_of
from cacheblend_rag.store.kv import read_whole

_MOST_KEPT = 32 << 20
"""Characters of text whose chunks are kept until their turn comes; further documents are read and cut once more then."""
SAMPLES = 5
"""Chunks that a plan keeps to be measured."""
_NAMED = 3
"""Documents named in an error: those of most KV."""


@dataclass(frozen=True)
class PlannedDocument:
    """Says what indexing one document takes.

    Attributes:
        path: The document.
        chunks: Its chunks.
        tokens: Tokens of its chunks that have no stored KV and stand in no document before it.
    """

    path: str
    chunks: int
    tokens: int


@dataclass(frozen=True)
class IndexPlan:
    """Says how much there is to index, known before all but one chunk of it is computed.

    Attributes:
        documents: Documents that are new or changed.
        chunks: Their chunks.
        missing: How many distinct ones have no stored KV yet; None where another machine stores it.
        tokens: Tokens of those; where that is not known, of all.
        kv_bytes: Expected size of their KV, by every hand; None where none is stored, or another machine stores it.
        room_bytes: Bytes that the store has left, of its budget and of its disk; None where neither limits it.
        capacity_bytes: Bytes that it could hold if it held nothing else; None likewise.
        each: What each document takes.
    """

    documents: int
    chunks: int
    missing: int | None
    tokens: int
    kv_bytes: int | None = None
    room_bytes: int | None = None
    capacity_bytes: int | None = None
    each: tuple[PlannedDocument, ...] = ()

    def kv_bytes_of(self, document: PlannedDocument) -> int | None:
        """Return the expected size of one document's KV; None where that of all is not known."""
        if self.kv_bytes is None:
            return None
        return round(self.kv_bytes * document.tokens / self.tokens) if self.tokens else 0

    @property
    def fits(self) -> bool:
        """Return whether the store has room for all of it, as far as that is known."""
        return self.kv_bytes is None or self.room_bytes is None or self.kv_bytes <= self.room_bytes

    @property
    def too_large(self) -> bool:
        """Return whether an empty store would have none: it would drop what the run has computed, beside all that it has."""
        return self.kv_bytes is not None and self.capacity_bytes is not None and self.kv_bytes > self.capacity_bytes


class TooMuchKVError(StoreError):
    """More KV is to be computed than the store can hold; that was not begun.

    Attributes:
        what: How much, how much it can hold, and which documents take most.
    """

    def __init__(self, plan: IndexPlan):
        """Say that, and what to do."""
        largest = sorted(plan.each, key=lambda document: -document.tokens)[:_NAMED]
        named = "; ".join(
            f"{in_one_line(each.path)} ({each.chunks:,} chunks, {size(plan.kv_bytes_of(each))})" for each in largest
        )
        self.what = (
            f"The KV of these {plan.chunks:,} chunks will take about {size(plan.kv_bytes)}, and the store can hold "
            f"{size(plan.capacity_bytes)}. Most is taken by {named}"
        )
        super().__init__(
            f"{self.what}. Give it more (a larger budget, another disk), or index less; or index with beyond_budget=True, and "
            "what has no room is computed when it is asked for."
        )


@dataclass
class CutDocument:
    """A document to index: its digest when it was cut, and its chunks; None where they were too many to keep.

    ``tokens`` counts those of its chunks without KV that no document before it has.
    """

    path: str
    digest: str
    count: int
    tokens: int
    chunks: Sequence[Chunk] | None


@dataclass
class Planner:
    """Cuts documents and adds up what of them must be computed.

    Attributes:
        entries: Where KV is looked for, and its room; None for the engine's own store.
        documents: Those that are to be indexed.
        samples: The first chunks without stored KV: to compute some shows how large it is, and how long it takes.
        token_bytes: Size of the KV of a chunk's token; 0 until :meth:`sized` knows it.
    """

    engine: BlendEngine
    config: IndexConfig
    entries: Entries | None = None
    documents: list[CutDocument] = field(default_factory=list)
    samples: list[Chunk] = field(default_factory=list)
    token_bytes: float = 0.0
    _missing: set[str] = field(default_factory=set)
    _tokens: int = 0
    _kept: int = 0

    def cut(self, document: Document) -> None:
        """Take a document on."""
        chunks, before = self._cut(document), self._tokens
        lasting = self._lasting()
        for chunk in chunks:
            if chunk.id not in self._missing and (lasting is None or not lasting.contains(chunk.token_ids)):
                self._missing.add(chunk.id)
                self._tokens += len(chunk.token_ids)
                if len(self.samples) < SAMPLES and chunk.token_ids:
                    self.samples.append(chunk)
        keep = self._kept + len(document.text) <= _MOST_KEPT
        self._kept += len(document.text) if keep else 0
        kept = chunks if keep else None
        self.documents.append(CutDocument(document.path, document.digest, len(chunks), self._tokens - before, kept))

    def _lasting(self) -> Entries | None:
        entries = self.entries or self.engine.entries
        return None if entries is None else entries.lasting()

    def chunks_of(self, cut: CutDocument) -> tuple[str, Sequence[Chunk]] | SkippedDocument:
        """Return a document's digest and chunks, which this forgets; or why there are none any more."""
        if cut.chunks is not None:
            chunks, cut.chunks = cut.chunks, None
            return cut.digest, chunks
        document = load_document(cut.path)
        if isinstance(document, SkippedDocument):
            return document
        return document.digest, self._cut(document)

    def _cut(self, document: Document) -> list[Chunk]:
        return split_document(document, self.engine.tokenizer, self.config.chunk_tokens, self.config.overlap)

    def plan(self) -> IndexPlan:
        """Return what there is to do; the size of the KV is not known before some of it is stored: see :meth:`sized`."""
        count = sum(document.count for document in self.documents)
        missing = None if self.engine.entries is None else len(self._missing)
        each = tuple(PlannedDocument(document.path, document.count, document.tokens) for document in self.documents)
        return IndexPlan(len(self.documents), count, missing, self._tokens, each=each)

    def sized(self, plan: IndexPlan, stored: Chunk) -> IndexPlan:
        """Return the plan with the size expected from a chunk whose KV the engine has just stored."""
        entries, lasting = self.engine.entries, self._lasting()
        if entries is None or lasting is None or not stored.token_ids:
            return plan
        nbytes = _stored_bytes(entries, stored, lasting.store.formats[-1])
        if not nbytes:
            return plan
        self.token_bytes = nbytes / len(stored.token_ids)
        stats = stats_of(lasting.store)
        tiers = [(tier.capacity, tier.nbytes) for tier in stats.tiers or (stats,)]
        own = nbytes if self.entries is None else 0  # the chunk's own room counts as free
        limited = [(most, max(0, most - used + own)) for most, used in tiers if most is not None]
        expected = round(self.token_bytes * self._tokens)
        if len(limited) < len(tiers):
            return replace(plan, kv_bytes=expected)
        most, room = map(max, zip(*limited, strict=True))
        return replace(plan, kv_bytes=expected, room_bytes=room, capacity_bytes=most)


def _stored_bytes(entries: Entries, chunk: Chunk, kept_as: EntryFormat) -> int:
    """Return the size of a stored chunk's KV, of all ranks together, in the format it is to be kept in; 0 if none is stored."""
    # One that is larger than a disk's whole budget is in RAM alone.
    lasting, keys = entries.lasting().store, entries.written_keys(chunk.token_ids)
    if kept_as.codec.name in lasting.codecs:
        found = (lasting.entry(key) or entries.store.entry(key) for key in keys)
        return sum(entry.nbytes for entry in found if entry is not None)
    stored = ((key, entries.store.get(key)) for key in keys)
    whole = ((key, read_whole(kv)) for key, kv in stored if kv is not None)
    return sum(kept_as.encode(key, kv).nbytes for key, kv in whole if kv is not None)
