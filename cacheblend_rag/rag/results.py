"""What goes into a pipeline and comes out of it: turns of a conversation, sources, answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cacheblend_rag.engines.results import Generation
from cacheblend_rag.retrieval.index import Hit


@dataclass(frozen=True)
class Turn:
    """A question of a conversation that has been answered, for the questions that follow it.

    Attributes:
        question: The question.
        answer: Its answer.
        hits: The chunks that stood in its prompt.
    """

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
    """

    id: str
    path: str
    ordinal: int
    score: float | None
    text: str


@dataclass(frozen=True)
class Retrieved:
    """What a question brought up: chunks, best first, hits followed by their continuations; and the seconds it took."""

    hits: tuple[Hit, ...]
    seconds: float

    @property
    def sources(self) -> tuple[Source, ...]:
        """The hits as they are shown to a user."""
        return tuple(Source(h.chunk.id, h.path, h.ordinal, h.score, h.chunk.text) for h in self.hits)


@dataclass(frozen=True)
class RagAnswer:
    """An answer and where it comes from.

    Attributes:
        answer: The answer, without outer whitespace.
        sources: Chunks in the prompt, in its order.
        generation: What the engine reports.
        retrieve_s: Seconds of retrieval.
        notes: What the user should know, such as sources left out for want of room.
    """

    answer: str
    sources: tuple[Source, ...]
    generation: Generation
    retrieve_s: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``ask --json`` prints it."""
        g = self.generation
        return {
            "answer": self.answer,
            "sources": [{"id": s.id, "path": s.path, "score": s.score, "text": s.text} for s in self.sources],
            "mode": g.mode,
            "reason": g.reason,
            "policy": g.policy,
            "ratio": g.ratio,
            "usage": asdict(g.usage),
            "timings": {"retrieve_s": self.retrieve_s, **asdict(g.timings)},
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class RagEvent:
    """A piece of a streamed answer; the first carries the sources, the last the whole :class:`RagAnswer`."""

    text: str
    sources: tuple[Source, ...] | None = None
    answer: RagAnswer | None = None
