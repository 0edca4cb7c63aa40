"""Plans an indexing run: which documents must be indexed, and how much KV each document takes."""

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
from cacheblend_rag.store.kv import read_whole

_MOST_KEPT = 32 << 20
"""Maximum characters of text whose chunks stay in memory until they are indexed; further documents are read and split
twice."""
SAMPLES = 5
"""Number of chunks that a plan holds for measuring."""
_NAMED = 3
"""Number of documents named in an error: the documents with the most KV."""


@dataclass(frozen=True)
class PlannedDocument:
    """Describes the work of indexing one document.

    Attributes:
        path: The document.
        chunks: Number of chunks.
        tokens: Tokens of the chunks that have no stored KV and stand in no earlier document.
    """

    path: str
    chunks: int
    tokens: int


@dataclass(frozen=True)
class IndexPlan:
    """Describes the work of an indexing run, known before the KV of more than one chunk is computed.

    Attributes:
        documents: Number of new and changed documents.
        chunks: Number of chunks in these documents.
        missing: Number of distinct chunks without stored KV; None if another machine stores the KV.
        tokens: Tokens of the missing chunks; of all distinct chunks if ``missing`` is None.
        kv_bytes: Expected size of the missing KV, over all ranks; None if no KV is stored, or another machine stores
            the KV.
        room_bytes: Bytes left in the store, by its budget and its disk; None if neither limits the store.
        capacity_bytes: Bytes that the store could hold if empty; None if neither budget nor disk limits the store.
        each: Work for each document.
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
        """Return the expected size of one document's KV, or None if the size of all KV is unknown."""
        if self.kv_bytes is None:
            return None
        return round(self.kv_bytes * document.tokens / self.tokens) if self.tokens else 0

    @property
    def fits(self) -> bool:
        """Return whether the store has room for all KV, as far as size and room are known."""
        return self.kv_bytes is None or self.room_bytes is None or self.kv_bytes <= self.room_bytes

    @property
    def too_large(self) -> bool:
        """Return whether the KV exceeds even an empty store: the run would evict older KV, and then KV of its own."""
        return self.kv_bytes is not None and self.capacity_bytes is not None and self.kv_bytes > self.capacity_bytes


class TooMuchKVError(StoreError):
    """Reports that a run has more KV to compute than the store can hold; raised before the KV is computed.

    Attributes:
        what: Size of the KV, capacity of the store, and the documents with the most KV, in words.
    """

    def __init__(self, plan: IndexPlan):
        """Make the message from the plan."""
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
    """Holds a document to index: the digest when it was split, and its chunks, or None if there were too many.

    ``tokens`` counts the tokens of its chunks without KV that no earlier document has.
    """

    path: str
    digest: str
    count: int
    tokens: int
    chunks: Sequence[Chunk] | None


@dataclass
class Planner:
    """Splits documents and adds up the KV that must be computed.

    Attributes:
        entries: Store in which KV is looked for, and whose room counts; None for the engine's own store.
        documents: Documents to index.
        samples: First chunks without stored KV, with which the KV's size and the time are measured.
        token_bytes: KV bytes of one token of a chunk; 0 until :meth:`sized` measures them.
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
        """Split a document and add it to the plan."""
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
        """Return a document's digest and chunks, and release the chunks; or return why the document is skipped now."""
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
        """Return the plan without the size of the KV, which :meth:`sized` adds once some KV is stored."""
        count = sum(document.count for document in self.documents)
        missing = None if self.engine.entries is None else len(self._missing)
        each = tuple(PlannedDocument(document.path, document.count, document.tokens) for document in self.documents)
        return IndexPlan(len(self.documents), count, missing, self._tokens, each=each)

    def sized(self, plan: IndexPlan, stored: Chunk) -> IndexPlan:
        """Return the plan with the KV size expected from a chunk whose KV the engine has just stored."""
        entries, lasting = self.engine.entries, self._lasting()
        if entries is None or lasting is None or not stored.token_ids:
            return plan
        nbytes = _stored_bytes(entries, stored, lasting.store.formats[-1])
        if not nbytes:
            return plan
        self.token_bytes = nbytes / len(stored.token_ids)
        stats = lasting.store.stats()
        tiers = [(tier.capacity, tier.nbytes) for tier in stats.tiers or (stats,)]
        own = nbytes if self.entries is None else 0  # the room of the chunk itself counts as free
        limited = [(most, max(0, most - used + own)) for most, used in tiers if most is not None]
        expected = round(self.token_bytes * self._tokens)
        if len(limited) < len(tiers):
            return replace(plan, kv_bytes=expected)
        most, room = map(max, zip(*limited, strict=True))
        return replace(plan, kv_bytes=expected, room_bytes=room, capacity_bytes=most)


def _stored_bytes(entries: Entries, chunk: Chunk, kept_as: EntryFormat) -> int:
    """Return the bytes of a chunk's stored KV in the format ``kept_as``, over all ranks; 0 if no KV is stored."""
    # KV that is larger than a disk's whole budget is only in RAM.
    lasting, keys = entries.lasting().store, entries.written_keys(chunk.token_ids)
    if kept_as.codec.name in lasting.codecs:
        found = (lasting.entry(key) or entries.store.entry(key) for key in keys)
        return sum(entry.nbytes for entry in found if entry is not None)
    stored = ((key, entries.store.get(key)) for key in keys)
    whole = ((key, read_whole(kv)) for key, kv in stored if kv is not None)
    return sum(kept_as.encode(key, kv).nbytes for key, kv in whole if kv is not None)
