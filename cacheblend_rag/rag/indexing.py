"""Bringing an index and the KV store up to date with files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.retrieval.chunking import iter_chunks
from cacheblend_rag.retrieval.documents import Document, SkippedDocument, file_digest, find_documents, load_document
from cacheblend_rag.retrieval.index import ChunkIndex

_BATCH = 64


@dataclass(frozen=True)
class IndexProgress:
    """Where indexing stands.

    Attributes:
        path: The document at hand.
        documents_done: Documents finished.
        documents: Documents in all.
        chunks_done: Chunks of the document at hand whose KV is done.
        chunks: Chunks of the document at hand; 0 before it is cut.
    """

    path: str
    documents_done: int
    documents: int
    chunks_done: int = 0
    chunks: int = 0


@dataclass
class IndexReport:
    """What indexing did. Paths are absolute.

    Attributes:
        added: Documents that are new.
        changed: Documents replaced by a new version.
        unchanged: Documents left as they are.
        removed: Documents whose files are gone or hold no text any more.
        skipped: Files left out, and why.
        chunks: Chunks of the documents added and changed.
        tokens: Tokens whose KV was computed; chunks already in the store cost none.
        ranked: Chunks whose static deviation was measured, for policies that need it.
        rank_s: Seconds of that, where the engine can tell.
        without_kv: Ids of chunks whose KV is not in the store, and why; a question that needs them computes them. Where this run
            took the place of earlier ones, their chunks are among them.
        kv_bytes: Size of all stored KV afterwards; None where another machine keeps it.
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
    paths: Iterable[str | Path],
    progress: Callable[[IndexProgress], None] | None = None,
) -> IndexReport:
    """Bring ``index`` and the engine's KV store up to date with files and directories.

    Unchanged documents are left alone. A document enters the index in one step, after the KV of its last chunk is in the
    store: an interrupted run loses nothing, and the next one goes on where it stopped. Documents whose files have vanished
    from one of the directories leave the index, and with them the KV that no other document needs. A file that cannot be
    read for now keeps the version indexed before.

    Raises:
        InputError: A path that does not exist.
        StoreError: The store or the index cannot be written. What is in them stays.
    """
    return _Run(engine, index, progress).run([Path(path) for path in paths])


class _Run:
    def __init__(
        self, engine: BlendEngine, index: ChunkIndex, progress: Callable[[IndexProgress], None] | None
    ) -> None:
        self.engine, self.index, self.progress = engine, index, progress
        self.config = index.config
        self.report = IndexReport()
        self.at = IndexProgress("", 0, 0)

    def run(self, paths: Sequence[Path]) -> IndexReport:
        begin = time.perf_counter()
        files = [str(file) for file in find_documents(paths)]
        known = {document.path: document.digest for document in self.index.documents()}
        for number, file in enumerate(files):
            self._tell(IndexProgress(file, number, len(files)))
            self._bring_up_to_date(file, known.get(file))
        for path in _vanished(known.keys() - set(files), paths):
            self._remove(path)
        if files:
            self._tell(IndexProgress(files[-1], len(files), len(files)))
        self._look_back()
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def _look_back(self) -> None:
        """Report what the store evicted to make room: each put went well, and the KV is not there all the same."""
        entries, store = self.engine.entries, self.engine.store
        if entries is None or store is None:
            return
        stats = store.stats()
        self.report.kv_bytes = (stats.tiers or (stats,))[-1].nbytes  # the last tier keeps all, the faster ones copies
        if not (self.report.tokens and self.engine.gate.passed):
            return
        lost = "the store's budget is full, and newer KV took its place (see --disk-budget)"
        lasting = entries.lasting()
        for chunk in self.index.chunks():
            if chunk.id not in self.report.without_kv and not lasting.contains(chunk.token_ids):
                self.report.without_kv[chunk.id] = lost

    def _tell(self, at: IndexProgress) -> None:
        self.at = at
        if self.progress is not None:
            self.progress(at)

    def _bring_up_to_date(self, file: str, known: str | None) -> None:
        if known is not None and file_digest(file) == known:
            self.report.unchanged.append(file)
            return
        document = load_document(file)
        if isinstance(document, Document):
            self._put(document)
            (self.report.added if known is None else self.report.changed).append(file)
            return
        if known is not None:
            if document.blank:
                self._remove(file)
            else:
                document = SkippedDocument(file, f"{document.reason} (the version indexed before stays)")
        self.report.skipped.append(document)

    def _put(self, document: Document) -> None:
        chunks = list(
            iter_chunks(
                document.text,
                self.engine.tokenizer,
                self.config.chunk_tokens,
                self.config.overlap,
                document.metadata,
            )
        )
        self._tell(IndexProgress(self.at.path, self.at.documents_done, self.at.documents, 0, len(chunks)))
        # Batches, so that a store error or an interruption costs one batch of work and not the document's.
        for begin in range(0, len(chunks), _BATCH):
            result = self.engine.precompute(chunks[begin : begin + _BATCH], self._count)
            self.report.tokens += result.tokens
            self.report.ranked += result.ranked
            self.report.rank_s += result.rank_s
            self.report.without_kv.update(result.failed)
        self._forget(self.index.add(document.path, document.digest, chunks))
        self.report.chunks += len(chunks)

    def _count(self, chunks: int) -> None:
        at = self.at
        self._tell(IndexProgress(at.path, at.documents_done, at.documents, at.chunks_done + chunks, at.chunks))

    def _remove(self, path: str) -> None:
        self._forget(self.index.delete(path))
        self.report.removed.append(path)

    def _forget(self, chunk_ids: Sequence[str]) -> None:
        """Drop chunks that no document holds any more from the engine and its store."""
        self.engine.forget(chunk_ids)


def _vanished(candidates: Iterable[str], paths: Sequence[Path]) -> list[str]:
    """Return the documents below the given directories whose files are certainly gone."""
    directories = [path.expanduser().absolute() for path in paths if path.expanduser().is_dir()]
    gone = []
    for name in sorted(candidates):
        if not any(Path(name).is_relative_to(directory) for directory in directories):
            continue
        try:
            Path(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            gone.append(name)
        except OSError:
            continue  # out of reach for now, which is not the same as gone
    return gone
