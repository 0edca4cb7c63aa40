"""Holds what goes into a pipeline and comes out of it: turns of a conversation, sources, answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.results import Generation
from cacheblend_rag.retrieval.hit import Hit

if TYPE_CHECKING:
    from cacheblend_rag.engines.thoughts import Parts


@dataclass(frozen=True)
class Turn:
    """A question of a conversation, its answer and the chunks that stood in its prompt, for the questions that follow it."""

    question: str
    answer: str
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Retrieved:
    """Holds a question's chunks, best first, hits followed by their continuations; and the seconds it took."""

    hits: tuple[Hit, ...]
    seconds: float


@dataclass(frozen=True)
class RagAnswer:
    """An answer and where it comes from.

    Attributes:
        answer: The answer, without outer whitespace.
        sources: Chunks in the prompt, the most relevant first, and behind them those that came along with others.
        generation: What the engine reports.
        retrieve_s: Seconds of retrieval.
        notes: What the user should know, such as sources left out for want of room.
        reasoning: What the model thought before it answered, where it says so (:mod:`cacheblend_rag.engines.thoughts`).
    """

    answer: str
    sources: tuple[Hit, ...]
    generation: Generation
    retrieve_s: float
    notes: tuple[str, ...] = ()
    reasoning: str = ""

    def turn(self, question: str) -> Turn:
        """Return question and answer as the ``history`` of the next question takes them."""
        return Turn(question, self.answer, self.sources)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``ask --json`` prints it."""
        g = self.generation
        return {
            "answer": self.answer,
            "reasoning": self.reasoning,
            "sources": [
                {"id": s.id, "path": s.path, "page": s.page, "score": s.score, "text": s.text} for s in self.sources
            ],
            **g.facts,
            "timings": {"retrieve_s": self.retrieve_s, **asdict(g.timings)},
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class RagEvent:
    """A piece of a streamed answer, or of what is thought before it.

    The first carries the sources, the last the whole :class:`RagAnswer`.
    """

    text: str
    sources: tuple[Hit, ...] | None = None
    answer: RagAnswer | None = None
    reasoning: str = ""


def unanswered(done: Generation, said: Parts) -> tuple[str, ...]:
    """Return the note that there are thoughts and no answer, where it is so."""
    if said.answer.strip() or not said.reasoning:
        return ()
    tokens = done.usage.completion_tokens
    return (f"no answer: the model was still thinking after {tokens} tokens. Give it more (max_tokens).",)
