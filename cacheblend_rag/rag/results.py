"""Holds what goes into a pipeline and comes out of it: turns of a conversation, sources, answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cacheblend_rag.engines.results import Generation
from cacheblend_rag.retrieval.index import Hit


@dataclass(frozen=True)
class Turn:
    """A question of a conversation, its answer and the chunks that stood in its prompt, for the questions that follow it."""

    question: str
    answer: str
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Source:
    """A chunk that stood in a prompt.

    Attributes:
        id: The chunk's id.
        path: Its document.
        ordinal: Its number in the document, from 0.
        score: Similarity to the question, or to it and the turn before; None for a chunk that came along: the continuation of a
            hit, or a chunk of the turn before.
        text: Its text.
        page: Page of the document that it begins on, from 1; None for documents without pages, and for those indexed before pages
            were noted.
        last_page: Page that it ends on; None where it is the same.
    """

    id: str
    path: str
    ordinal: int
    score: float | None
    text: str
    page: int | None = None
    last_page: int | None = None

    @classmethod
    def of(cls, hit: Hit) -> Source:
        """Return a hit as it is shown to a user."""
        at = hit.chunk.metadata
        return cls(hit.chunk.id, hit.path, hit.ordinal, hit.score, hit.chunk.text, at.get("page"), at.get("last_page"))

    @property
    def pages(self) -> str:
        """Return the pages in words, as ``page 3`` or ``pages 3-4``; empty where the document has none."""
        if self.page is None:
            return ""
        word = "slide" if self.path.lower().endswith(".pptx") else "page"
        return f"{word} {self.page}" if self.last_page is None else f"{word}s {self.page}-{self.last_page}"

    @property
    def place(self) -> str:
        """Return where in the document it stands, in words: its pages, else the number of the chunk."""
        return self.pages or f"chunk {self.ordinal}"


@dataclass(frozen=True)
class Retrieved:
    """Holds a question's chunks, best first, hits followed by their continuations; and the seconds it took."""

    hits: tuple[Hit, ...]
    seconds: float

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the hits as they are shown to a user."""
        return tuple(map(Source.of, self.hits))


@dataclass(frozen=True)
class RagAnswer:
    """An answer and where it comes from.

    Attributes:
        answer: The answer, without outer whitespace.
        sources: Chunks in the prompt, in its order.
        generation: What the engine reports.
        retrieve_s: Seconds of retrieval.
        notes: What the user should know, such as sources left out for want of room.
        hits: What the sources were made of, for the questions that follow: see :meth:`turn`.
    """

    answer: str
    sources: tuple[Source, ...]
    generation: Generation
    retrieve_s: float
    notes: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()

    def turn(self, question: str) -> Turn:
        """Return question and answer as the ``history`` of the next question takes them."""
        return Turn(question, self.answer, self.hits)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``ask --json`` prints it."""
        g = self.generation
        return {
            "answer": self.answer,
            "sources": [
                {"id": s.id, "path": s.path, "page": s.page, "score": s.score, "text": s.text} for s in self.sources
            ],
            **g.facts,
            "timings": {"retrieve_s": self.retrieve_s, **asdict(g.timings)},
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class RagEvent:
    """A piece of a streamed answer; the first carries the sources, the last the whole :class:`RagAnswer`."""

    text: str
    sources: tuple[Source, ...] | None = None
    answer: RagAnswer | None = None
