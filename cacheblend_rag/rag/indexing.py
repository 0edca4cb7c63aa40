"""Brings an index and the KV store up to date with files."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.printable import size
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.locking import indexing_alone
from cacheblend_rag.rag.planning import IndexPlan, PlannedDocument, Planner, TooMuchKVError
from cacheblend_rag.retrieval.documents import (
    Document,
    FoundDocuments,
    SkippedDocument,
    file_digest,
    is_directory,
    load_document,
)
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store import TieredStore

_BATCH = 64


@dataclass(frozen=True)
class IndexProgress:
    """Reports the progress of indexing.

    Attributes:
        path: Current document.
        documents_done: Number of finished documents.
        documents: Number of documents in all.
        chunks_done: Chunks of the current document whose KV is done.
        chunks: Chunks of the current document; 0 while the documents are read and split, before anything is computed.
        plan: Plan of what to compute, once all documents are split.
        planned_done: Chunks of the plan that are done, in all documents.
        embedded: Chunks of the current document that were embedded for retrieval, which is the last step.
    """

    path: str
    documents_done: int
    documents: int
    chunks_done: int = 0
    chunks: int = 0
    plan: IndexPlan | None = None
    planned_done: int = 0
    embedded: int = 0


@dataclass
class IndexReport:
    """Reports the result of indexing. Paths are absolute.

    Attributes:
        added: New documents.
        changed: Documents replaced by a new version, or whose KV was not in the store, or not written by the engine's
            KV writer.
        unchanged: Documents left as they are.
        removed: Documents whose files are gone, or hold no text any more.
        skipped: Files left out, and why.
        chunks: Number of chunks in the added and changed documents.
        tokens: Tokens whose KV was computed; chunks already in the store cost none.
        ranked: Chunks whose static deviation was measured, for policies that need it.
        rank_s: Seconds of measuring static deviations, if the engine can tell.
        without_kv: Ids of chunks whose KV is not in the store, and why; a question that needs such a chunk computes its
            KV. Chunks of earlier runs, whose KV this run has evicted, are included.
        kv_bytes: Size of all stored KV after the run; None if another machine stores the KV.
        seconds: Wall-clock time.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[SkippedDocument] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    ranked: int = 0
    rank_s: float = 0.0
    without_kv: dict[str, str] = field(default_factory=dict)
    kv_bytes: int | None = None
    seconds: float = 0.0


def index_documents(
    engine: BlendEngine,
    index: ChunkIndex,
    found: FoundDocuments,
    progress: Callable[[IndexProgress], None] | None = None,
    beyond_budget: bool = False,
) -> IndexReport:
    """Bring ``index`` and the engine's KV store up to date with the files that a search has found.

    Unchanged documents whose KV is stored are left alone. All other documents are read and split first, so that
    ``progress`` can report how much there is to do. A document enters the index in one step, after the KV of its last
    chunk is in the store: an interrupted run loses nothing, and the next run continues at the same place. If the engine
    has another KV writer than the index, the engine writes the KV of all documents. Documents whose files have vanished
    from one of the directories leave the index, together with the KV that no other document needs. A file that cannot
    be read for now keeps its indexed version. Files that the search's patterns leave out are not looked at: their
    indexed documents stay.

    The run first stores the KV of one chunk, from which it estimates the size of all KV. The run stops if all KV is
    more than the store can hold, unless ``beyond_budget`` is True: then the store evicts KV of older chunks, and of
    chunks of this run.

    Raises:
        ModelError: The embedding model cannot be loaded.
        TooMuchKVError: The KV is more than the store can hold, and ``beyond_budget`` is False.
        StoreError: The store or the index cannot be written, or another run is indexing into it. Their contents stay.
    """
    if engine.writer is None and engine.entries is not None and (why := index.config.unused_by(None)):
        warnings.warn(why, stacklevel=2)
    with indexing_alone(index.directory):
        return _IndexRun(engine, index, progress, beyond_budget).run(found)


def nothing_to_read(found: FoundDocuments, known: Mapping[str, str]) -> IndexReport | None:
    """Return the report of a run over unchanged files and files without text; None if a run would change anything.

    ``known`` has the digest of each indexed document, by path.
    """
    report = IndexReport(skipped=list(found.skipped))
    for file in map(str, found.files):
        if file in known and file_digest(file) == known[file]:
            report.unchanged.append(file)
        elif file in known or isinstance(document := load_document(file), Document):
            return None
        else:
            report.skipped.append(document)
    return None if any(link.path in known for link in found.skipped) else report


def forget(engine: BlendEngine, index: ChunkIndex, chunks: Sequence[Chunk]) -> None:
    """Make an engine forget chunks that an index no longer holds, and delete their KV, whoever has written the KV."""
    engine.forget(chunks)
    if (entries := engine.entries) is None:
        return
    for writer in {*index.config.writers} - {engine.writer}:
        for chunk in chunks:
            entries.by(writer).delete(chunk.token_ids)


class _IndexRun:
    def __init__(
        self,
        engine: BlendEngine,
        index: ChunkIndex,
        progress: Callable[[IndexProgress], None] | None,
        beyond_budget: bool,
    ) -> None:
        self.engine, self.index, self.progress, self._beyond_budget = engine, index, progress, beyond_budget
        self.planner = Planner(engine, index)
        self.report = IndexReport(unchanged=self.planner.unchanged)
        self.at = IndexProgress("", 0, 0)

    def run(self, found: FoundDocuments) -> IndexReport:
        begin = time.perf_counter()
        files = [str(file) for file in found.files]
        known = self.planner.known
        for link in found.skipped:
            self._skip(link)
        for number, file in enumerate(files):
            self._tell(IndexProgress(file, number, len(files)))
            if (skipped := self.planner.read(file)) is not None:
                self._skip(skipped)
        documents = self.planner.documents
        if documents:
            self.index.load_embedder()  # a model that cannot be loaded is reported before the KV is computed
        self._size(self.planner.plan())
        for number, document in enumerate(documents, len(files) - len(documents)):
            count = document.chunks
            self._tell(IndexProgress(document.path, number, len(files), 0, count, self.at.plan, self.at.planned_done))
            self._put(document)
        for path in vanished(known.keys() - set(files), found.roots):
            self._remove(path)
        if files:
            self._tell(replace(self.at, path=files[-1], documents_done=len(files), documents=len(files)))
        self._look_back()
        if self.engine.writer is not None and self.planner.rewrites:
            self.index.note_writer(self.engine.writer)
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def _size(self, plan: IndexPlan) -> None:
        """Compute the KV of one chunk to estimate the size of all KV; raise TooMuchKVError if the size is too large."""
        if plan.documents:
            self._tell(replace(self.at, plan=plan, documents_done=self.at.documents - plan.documents))
        if self.engine.entries is not None and self.planner.samples:
            self._compute(self.planner.samples[:1])
            plan = self.planner.sized(plan, self.planner.samples[0])
            if plan.too_large and not self._beyond_budget:
                raise TooMuchKVError(plan)
        self.at = replace(self.at, plan=plan)

    def _compute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> None:
        result = self.engine.precompute(chunks, progress)
        self.report.tokens += result.tokens
        self.report.ranked += result.ranked
        self.report.rank_s += result.rank_s
        self.report.without_kv.update(result.failed)

    def _look_back(self) -> None:
        """Report chunks without KV: to make room, the store may have evicted KV that was put without an error."""
        entries = self.engine.entries
        if entries is None:
            return
        if isinstance(entries.store, TieredStore):
            entries.store.flush()  # KV that is still being written is not lost
        lasting = entries.lasting()
        stats = lasting.store.stats()
        # The largest tier holds all KV, other tiers copies.
        self.report.kv_bytes = max(tier.nbytes for tier in stats.tiers or (stats,))
        if not (self.report.tokens and self.engine.gate.passed):
            return
        budgets = [tier.budget for tier in stats.tiers or (stats,)]
        most = max((budget or 0 for budget in budgets), default=0) if None not in budgets else None
        lost = "the store's budget is full, and newer KV took its place (see --disk-budget and --kv)"
        small = (
            f"the store's budget, {size(most)}, is smaller than the KV of one (see --disk-budget and --chunk-tokens)"
        )
        another = "it was computed without this KV writer, or by another one; index those documents again, too"
        others = [lasting.by(source) for source in {None, *self.index.config.writers} - {lasting.writer}]
        for chunk in self.index.chunks():
            if chunk.id not in self.report.without_kv and not lasting.contains(chunk.token_ids):
                never = most is not None and len(chunk.token_ids) * self.planner.token_bytes > most
                by_another = any(other.contains(chunk.token_ids) for other in others)
                self.report.without_kv[chunk.id] = another if by_another else small if never else lost

    def _tell(self, at: IndexProgress) -> None:
        self.at = at
        if self.progress is not None:
            self.progress(at)

    def _skip(self, document: SkippedDocument) -> None:
        if document.path in self.planner.known:
            if document.blank:
                self._remove(document.path)
            else:
                document = replace(document, reason=f"{document.reason} (the version indexed before stays)")
        self.report.skipped.append(document)

    def _put(self, document: PlannedDocument) -> None:
        found = self.planner.chunks_of(document)
        if isinstance(found, SkippedDocument):
            self._skip(found)
            return
        digest, chunks = found
        for begin in range(0, len(chunks), _BATCH):  # a store error or an interruption loses one batch of the work
            self._compute(chunks[begin : begin + _BATCH], self._count)
        self._forget(self.index.add(document.path, digest, chunks, self._embedded))
        (self.report.changed if document.path in self.planner.known else self.report.added).append(document.path)
        self.report.chunks += len(chunks)

    def _count(self, chunks: int) -> None:
        at = self.at
        self._tell(replace(at, chunks_done=at.chunks_done + chunks, planned_done=at.planned_done + chunks))

    def _embedded(self, chunks: int) -> None:
        self._tell(replace(self.at, embedded=self.at.embedded + chunks))

    def _remove(self, path: str) -> None:
        self._forget(self.index.delete(path))
        self.report.removed.append(path)

    def _forget(self, chunks: Sequence[Chunk]) -> None:
        """Remove chunks that no document holds any more from the engine and its store."""
        self.engine.registry.follow()  # from now on the index holds the indexed chunks, and the registry does not
        forget(self.engine, self.index, chunks)


def vanished(candidates: Iterable[str], roots: Sequence[Path]) -> list[str]:
    """Return the documents below the given directories whose files certainly no longer exist."""
    directories = [root for root in roots if is_directory(root)]
    gone = []
    for name in sorted(candidates):
        if not any(Path(name).is_relative_to(directory) for directory in directories):
            continue
        try:
            Path(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            gone.append(name)
        except OSError:
            continue  # the file cannot be reached for now, but may exist
    return gone
