"""Computes the KV of texts in an existing index, estimates the cost, and embeds texts for such an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.frameworks.uses import uses_of
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.embedding import Embedder

_T = TypeVar("_T")
_BATCH = 64
"""Number of texts whose KV one call computes: a run that is stopped repeats little."""
_SAMPLE = 8


@dataclass(frozen=True)
class ExistingEstimate:
    """Estimates the cost of computing the KV of an index.

    Attributes:
        chunks: Number of different texts in the index that can be chunks of a prompt.
        stored: Number of these chunks whose KV is stored; over a server, only measured chunks are known to be stored.
        tokens: Tokens of the other chunks, whose KV is to be computed.
        nbytes: Approximate size of their KV in tiers that outlast the process; None if a server stores the KV.
        seconds: Approximate time to compute their KV, measured on a few chunks; None without a measurement.
    """

    chunks: int
    stored: int
    tokens: int
    nbytes: int | None
    seconds: float | None

    def __str__(self) -> str:
        if self.stored == self.chunks:
            return f"{self.chunks:,} chunks, all stored"
        room = "" if self.nbytes is None else f" and {self.nbytes / 1e9:,.3g} GB of KV"
        time = "" if self.seconds is None else f", in about {_duration(self.seconds)}"
        return f"{self.chunks:,} chunks, {self.stored:,} of them stored; {self.tokens:,} tokens{room} to compute{time}"


def estimate_existing(engine: BlendEngine, texts: Iterable[str]) -> ExistingEstimate:
    """Return the cost of :func:`precompute_existing`, and compute the KV of a few texts to measure the cost.

    Raises:
        StoreError: The store cannot be written.
    """
    seen: set[str] = set()
    missing: list[tuple[int, ...]] = []
    sample: list[Chunk] = []
    entries, uses = engine.entries, uses_of(engine)
    for batch in _batches(texts):
        for chunk in uses.register(engine, batch):
            if chunk.id in seen:
                continue
            seen.add(chunk.id)
            if entries is None or not entries.contains(chunk.token_ids):
                missing.append(chunk.token_ids)
                if len(sample) < _SAMPLE:
                    sample.append(chunk)
    report = engine.precompute(sample) if sample else PrecomputeReport()
    tokens, left = report.tokens, sum(map(len, missing)) - sum(len(chunk.token_ids) for chunk in sample)
    held = None if entries is None else [entries.lasting().entry(chunk.token_ids) for chunk in sample]
    nbytes = None if held is None else sum(entry.nbytes for entry in held if entry is not None)
    return ExistingEstimate(
        len(seen),
        len(seen) - len(missing) + report.computed + report.present,
        left,
        None if nbytes is None or not tokens else round(nbytes / tokens * left),
        report.seconds / tokens * left if tokens else None,
    )


def precompute_existing(
    items: Iterable[_T],
    compute: Callable[[Sequence[_T]], PrecomputeReport],
    progress: Callable[[int], None] | None = None,
) -> PrecomputeReport:
    """Compute and store the KV of an index's items. Stored KV is skipped, so that a stopped run can continue.

    Args:
        items: Documents or nodes, each of which is one chunk.
        compute: Computes the KV of a batch of items.
        progress: Called with the number of items finished since the last call.

    Raises:
        StoreError: The store cannot be written. KV that was stored before stays.
    """
    done = PrecomputeReport()
    for batch in _batches(items):
        done += compute(batch)
        if progress is not None:
            progress(len(batch))
    return done


def _batches(items: Iterable[_T]) -> Iterator[tuple[_T, ...]]:
    iterator = iter(items)
    while batch := tuple(islice(iterator, _BATCH)):
        yield batch


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def open_embedder(name: str, query_encoder: str | Path | None, device: str | None = None) -> Embedder:
    """Load an embedding model.

    Args:
        name: A directory, or a sentence-transformers model of the hub.
        query_encoder: Directory that `cacheblend tune-retriever` has made for this model, to embed the questions.
        device: Name of a torch device.

    Raises:
        ModelError: The model cannot be loaded.
        StoreMismatchError: The query encoder was tuned for another model.
    """
    embedder = Embedder.load(name, device)
    return embedder if query_encoder is None else embedder.asked_by(query_encoder)


def text_vectors(embedder: Embedder, texts: Sequence[str]) -> list[list[float]]:
    """Return a unit vector for each text; a text longer than the model reads has the mean of its windows' vectors."""
    means = [windows.mean(axis=0) for windows in embedder.texts(texts)]
    return [(mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist() for mean in means]
