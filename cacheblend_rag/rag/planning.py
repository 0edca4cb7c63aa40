"""Plans an indexing run: which documents must be indexed, and how much KV and time each document takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.printable import in_one_line, size
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.chunking import split_document
from cacheblend_rag.retrieval.documents import (
    Document,
    FoundDocuments,
    SkippedDocument,
    file_digest,
    load_document,
)
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store import EntryFormat
from cacheblend_rag.store.kv import read_whole

Progress = Callable[[float, int, str], None]
_MOST_KEPT = 32 << 20
"""Maximum characters of text whose chunks stay in memory until they are indexed; further documents are read and split
twice."""
SAMPLES = 5
"""Number of chunks that a plan holds for measuring."""
_FULL = 0.9
"""Share of its budget from which a store counts as full."""
_MEASURED = "a few chunks, to measure the time"
_LONG_S = 10.0
"""Seconds after which a first chunk is enough to estimate the time of the other chunks."""
_NAMED = 3
"""Number of documents named in an error: the documents with the most KV."""


@dataclass
class PlannedDocument:
    """Describes a document to index.

    Attributes:
        path: The document.
        digest: Digest of the file when it was split.
        chunks: Number of chunks.
        tokens: Tokens of the chunks that have no stored KV and stand in no earlier document.
        cut: The chunks until they are indexed; None if there were too many to keep.
    """

    path: str
    digest: str
    chunks: int
    tokens: int
    cut: Sequence[Chunk] | None = None


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
class Planner:
    """Finds the documents that an index lacks, splits them, and adds up the KV that must be computed.

    Attributes:
        entries: Store in which KV is looked for, and whose room counts; None for the engine's own store.
        unchanged: Documents that are indexed as they are, with all of their KV.
        documents: Documents to index.
        samples: First chunks without stored KV, with which the KV's size and the time are measured.
        token_bytes: KV bytes of one token of a chunk; 0 until :meth:`sized` measures them.
        rewrites: Whether the engine writes the KV of all documents, since it has another KV writer than the index.
        known: Digest of each indexed document, by path.
    """

    engine: BlendEngine
    index: ChunkIndex
    entries: Entries | None = None
    unchanged: list[str] = field(default_factory=list)
    documents: list[PlannedDocument] = field(default_factory=list)
    samples: list[Chunk] = field(default_factory=list)
    token_bytes: float = 0.0
    _missing: set[str] = field(default_factory=set)
    _tokens: int = 0
    _kept: int = 0

    def __post_init__(self) -> None:
        """Read the index's configuration and the digests of its documents."""
        self._config = self.index.config
        self.rewrites = self.engine.writer not in (None, self._config.writer)
        self.known = {document.path: document.digest for document in self.index.documents()}

    def read(self, file: str) -> SkippedDocument | None:
        """Read and split a file unless it is unchanged, and add it to the plan; return it if it is skipped."""
        if self._is_unchanged(file):
            self.unchanged.append(file)
        elif isinstance(document := load_document(file), Document):
            self._add(document)
        else:
            return document
        return None

    def _is_unchanged(self, file: str) -> bool:
        if self.rewrites or file not in self.known or file_digest(file) != self.known[file]:
            return False
        if (lasting := self._lasting) is None or not self.engine.gate.passed or self._full:
            return True
        return all(lasting.contains(chunk.token_ids) for chunk in self.index.chunks_of(file))

    @cached_property
    def _lasting(self) -> Entries | None:
        entries = self.entries or self.engine.entries
        return None if entries is None else entries.lasting()

    @cached_property
    def _full(self) -> bool:
        """Return whether the store was full when the run began: then new KV would evict other KV.

        The result is cached, since counting the contents lists a disk.
        """
        store = None if self._lasting is None else self._lasting.store
        return store is not None and store.budget is not None and store.stats().nbytes > _FULL * store.budget

    def _add(self, document: Document) -> None:
        chunks, before, lasting = self._cut(document), self._tokens, self._lasting
        for chunk in chunks:
            if chunk.id not in self._missing and (lasting is None or not lasting.contains(chunk.token_ids)):
                self._missing.add(chunk.id)
                self._tokens += len(chunk.token_ids)
                if len(self.samples) < SAMPLES and chunk.token_ids:
                    self.samples.append(chunk)
        keep = self._kept + len(document.text) <= _MOST_KEPT
        self._kept += len(document.text) if keep else 0
        kept, tokens = chunks if keep else None, self._tokens - before
        self.documents.append(PlannedDocument(document.path, document.digest, len(chunks), tokens, kept))

    def chunks_of(self, planned: PlannedDocument) -> tuple[str, Sequence[Chunk]] | SkippedDocument:
        """Return a document's digest and chunks, and release the chunks; or return why the document is skipped now."""
        if planned.cut is not None:
            chunks, planned.cut = planned.cut, None
            return planned.digest, chunks
        document = load_document(planned.path)
        if isinstance(document, SkippedDocument):
            return document
        return document.digest, self._cut(document)

    def _cut(self, document: Document) -> list[Chunk]:
        return split_document(document, self.engine.tokenizer, self._config.chunk_tokens, self._config.overlap)

    def plan(self) -> IndexPlan:
        """Return the plan without the size of the KV, which :meth:`sized` adds once some KV is stored."""
        count = sum(document.chunks for document in self.documents)
        missing = None if self.engine.entries is None else len(self._missing)
        return IndexPlan(len(self.documents), count, missing, self._tokens, each=tuple(self.documents))

    def sized(self, plan: IndexPlan, stored: Chunk) -> IndexPlan:
        """Return the plan with the KV size expected from a chunk whose KV the engine has just stored."""
        entries, lasting = self.engine.entries, self._lasting
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


@dataclass(frozen=True)
class DocumentEstimate:
    """Estimates what indexing one document would take.

    Attributes:
        path: Absolute path of the document.
        chunks: Number of chunks.
        tokens: Tokens whose KV would be computed, without chunks that are stored or stand in an earlier document.
        kv_bytes: Size of the computed KV; None if no KV is stored, or another machine stores the KV.
        seconds: Time to compute, store and embed the chunks on this machine; None if the time cannot be measured here.
    """

    path: str
    chunks: int
    tokens: int
    kv_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class IndexEstimate:
    """Estimates what indexing would take.

    Attributes:
        documents: New and changed documents, most tokens first.
        unchanged: Number of documents that are already indexed, with all of their KV.
        skipped: Files that would be left out, and why.
        plan: Totals, and the room of the store.
        seconds: Time for all documents; None if the time cannot be measured here.
    """

    documents: list[DocumentEstimate]
    unchanged: int
    skipped: list[SkippedDocument]
    plan: IndexPlan
    seconds: float | None


def estimate(
    engine: BlendEngine,
    index: ChunkIndex,
    found: FoundDocuments,
    kept: Entries | None = None,
    progress: Progress = lambda done, total, at: None,
) -> IndexEstimate:
    """Split documents into chunks, and compute the KV of a few chunks to measure the KV's size and the time.

    Args:
        engine: The model; it stores the measured chunks, so give it a temporary store.
        index: The index, which is only read.
        found: The files.
        kept: Store into which the documents would be indexed, as the engine sees the store; None for an empty store
            like the engine's.
        progress: Called with the number of files read, the number of files and the current file; then with numbers of
            chunks instead of files.
    """
    planner, skipped = Planner(engine, index, kept), list(found.skipped)
    for number, path in enumerate(map(str, found.files)):
        progress(number, len(found.files), path)
        if (document := planner.read(path)) is not None:
            skipped.append(document)
    plan, token_s = planner.plan(), None
    if engine.entries is not None and planner.samples:
        token_s = _seconds_a_token(engine, index.load_embedder(), planner.samples, progress)
        plan = planner.sized(plan, planner.samples[0])
    elif engine.entries is not None:  # all KV is stored
        plan, token_s = replace(plan, kv_bytes=0), 0.0

    def seconds(tokens: int) -> float | None:
        return None if token_s is None else token_s * tokens

    documents = [
        DocumentEstimate(each.path, each.chunks, each.tokens, plan.kv_bytes_of(each), seconds(each.tokens))
        for each in sorted(plan.each, key=lambda each: -each.tokens)
    ]
    unchanged, totals = len(planner.unchanged), replace(plan, each=())
    return IndexEstimate(documents, unchanged, skipped, totals, seconds(plan.tokens))


def _seconds_a_token(engine: BlendEngine, embedder: Embedder, chunks: Sequence[Chunk], progress: Progress) -> float:
    """Measure the seconds a token takes to index; the first chunk, a warm-up, counts only if it is slow or alone."""
    timed, seconds = chunks, 0.0
    for done, timed in enumerate((chunks[:1], chunks[1:])):
        progress(done, len(chunks), _MEASURED)
        begin = time.perf_counter()
        engine.precompute(timed)
        embedder.texts([chunk.text for chunk in timed])
        seconds = time.perf_counter() - begin
        if seconds > _LONG_S or len(chunks) == 1:
            break
    return seconds / sum(len(chunk.token_ids) for chunk in timed)
