"""Estimates the cost of indexing each document before anything is indexed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.rag.planning import IndexPlan, Planner
from cacheblend_rag.retrieval.documents import (
    Document,
    FoundDocuments,
    SkippedDocument,
    file_digest,
    load_document,
)

Progress = Callable[[float, int, str], None]
_MEASURED = "a few chunks, to measure the time"
_LONG_S = 10.0
"""Seconds after which a first chunk is enough to estimate the time of the other chunks."""


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
    pipeline: RagPipeline,
    found: FoundDocuments,
    kept: Entries | None = None,
    progress: Progress = lambda done, total, at: None,
) -> IndexEstimate:
    """Split documents into chunks, and compute the KV of a few chunks to measure the KV's size and the time.

    Args:
        pipeline: Pipeline whose engine stores the measured chunks: give the engine a temporary store. The pipeline's
            index is only read.
        found: The files.
        kept: Store into which the documents would be indexed, as the engine sees the store; None for an empty store
            like the engine's.
        progress: Called with the number of files read, the number of files and the current file; then with numbers of
            chunks instead of files.

    Raises:
        ModelError: The embedding model cannot be loaded.

    Example:
        >>> found = estimate(pipeline, find_documents(["docs"]))
        >>> [(each.path, each.chunks, each.kv_bytes) for each in found.documents[:1]]
        [('/home/ada/docs/ships.csv', 1400, 31755665408)]
    """
    engine, index = pipeline.engine, pipeline.chunks
    planner = Planner(engine, index.config, kept)
    known = {document.path: document.digest for document in index.documents()}
    others = engine.writer not in (None, index.config.writer)  # another writer computes all KV anew
    skipped, unchanged = list(found.skipped), 0
    for number, path in enumerate(map(str, found.files)):
        progress(number, len(found.files), path)
        if path in known and not others and file_digest(path) == known[path] and _is_stored(pipeline, path, kept):
            unchanged += 1
        elif isinstance(document := load_document(path), Document):
            planner.cut(document)
        else:
            skipped.append(document)
    plan, token_s = planner.plan(), None
    if engine.entries is not None and planner.samples:
        token_s = _seconds_a_token(pipeline, planner.samples, progress)
        plan = planner.sized(plan, planner.samples[0])
    elif engine.entries is not None:  # all KV is stored
        plan, token_s = replace(plan, kv_bytes=0), 0.0
    documents = [
        DocumentEstimate(
            each.path,
            each.chunks,
            each.tokens,
            plan.kv_bytes_of(each),
            None if token_s is None else token_s * each.tokens,
        )
        for each in sorted(plan.each, key=lambda each: -each.tokens)
    ]
    return IndexEstimate(documents, unchanged, skipped, plan, None if token_s is None else token_s * plan.tokens)


def _is_stored(pipeline: RagPipeline, path: str, kept: Entries | None) -> bool:
    if kept is None or not pipeline.engine.gate.passed:
        return True
    lasting = kept.lasting()
    return all(lasting.contains(chunk.token_ids) for chunk in pipeline.chunks.chunks_of(path))


def _seconds_a_token(pipeline: RagPipeline, chunks: Sequence[Chunk], progress: Progress) -> float:
    """Measure the seconds a token takes to index; the first chunk, a warm-up, counts only if it is slow or alone."""
    embedder, seconds = pipeline.chunks.load_embedder(), 0.0
    timed: Sequence[Chunk] = chunks
    for done, timed in enumerate((chunks[:1], chunks[1:])):
        progress(done, len(chunks), _MEASURED)
        begin = time.perf_counter()
        pipeline.engine.precompute(timed)
        embedder.texts([chunk.text for chunk in timed])
        seconds = time.perf_counter() - begin
        if seconds > _LONG_S or len(chunks) == 1:
            break
    return seconds / sum(len(chunk.token_ids) for chunk in timed)
