"""Plans an indexing run: which documents must be indexed, and how much KV that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import StoreError
from cacheblend_rag.printable import size
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.chunking import split_document
from cacheblend_rag.retrieval.database import IndexConfig
from cacheblend_rag.retrieval.documents import Document, SkippedDocument, load_document
from cacheblend_rag.store.base import stats_of

_MOST_KEPT = 32 << 20
"""Characters of text whose chunks are kept until their turn comes; further documents are read and cut once more then."""


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
    """

    documents: int
    chunks: int
    missing: int | None
    tokens: int
    kv_bytes: int | None = None
    room_bytes: int | None = None
    capacity_bytes: int | None = None

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
        what: How much, and how much it can hold.
    """

    def __init__(self, plan: IndexPlan):
        """Say that, and what to do."""
        self.what = (
            f"The KV of these {plan.chunks:,} chunks will take about {size(plan.kv_bytes)}, and the store can hold "
            f"{size(plan.capacity_bytes)}"
        )
        super().__init__(
            f"{self.what}. Give it more (a larger budget, another disk), or index less; or index with beyond_budget=True, and "
            "what has no room is computed when it is asked for."
        )


@dataclass
class CutDocument:
    """A document to index: its digest when it was cut, and its chunks; None where they were too many to keep."""

    path: str
    digest: str
    count: int
    chunks: Sequence[Chunk] | None


@dataclass
class Planner:
    """Cuts documents and adds up what of them must be computed.

    Attributes:
        documents: Those that are to be indexed.
        token_bytes: Size of the KV of a chunk's token; 0 until :meth:`sized` knows it.
    """

    engine: BlendEngine
    config: IndexConfig
    documents: list[CutDocument] = field(default_factory=list)
    token_bytes: float = 0.0
    _missing: set[str] = field(default_factory=set)
    _tokens: int = 0
    _kept: int = 0

    def cut(self, document: Document) -> None:
        """Take a document on."""
        chunks = self._cut(document)
        entries = self.engine.entries
        lasting = None if entries is None else entries.lasting()
        for chunk in chunks:
            if chunk.id not in self._missing and (lasting is None or not lasting.contains(chunk.token_ids)):
                self._missing.add(chunk.id)
                self._tokens += len(chunk.token_ids)
        keep = self._kept + len(document.text) <= _MOST_KEPT
        self._kept += len(document.text) if keep else 0
        self.documents.append(CutDocument(document.path, document.digest, len(chunks), chunks if keep else None))

    def lacks(self, chunk: Chunk) -> bool:
        """Say whether a chunk's KV was missing when it was cut, and can be looked at once it is stored."""
        return self.engine.entries is not None and chunk.id in self._missing

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
        return IndexPlan(len(self.documents), count, missing, self._tokens)

    def sized(self, plan: IndexPlan, stored: Chunk) -> IndexPlan:
        """Return the plan with the size expected from a chunk whose KV has just been stored."""
        entries = self.engine.entries
        if entries is None or not stored.token_ids:
            return plan
        lasting = entries.lasting()
        # One that is larger than a disk's whole budget is in RAM alone.
        found = (lasting.store.entry(key) or entries.store.entry(key) for key in lasting.written_keys(stored.token_ids))
        nbytes = sum(entry.nbytes for entry in found if entry is not None)
        if not nbytes:
            return plan
        self.token_bytes = nbytes / len(stored.token_ids)
        stats = stats_of(lasting.store)
        tiers = [(tier.capacity, tier.nbytes) for tier in stats.tiers or (stats,)]
        # The chunk's own room counts as free.
        limited = [(most, max(0, most - used + nbytes)) for most, used in tiers if most is not None]
        expected = round(self.token_bytes * self._tokens)
        if len(limited) < len(tiers):
            return replace(plan, kv_bytes=expected)
        most, room = map(max, zip(*limited, strict=True))
        return replace(plan, kv_bytes=expected, room_bytes=room, capacity_bytes=most)
