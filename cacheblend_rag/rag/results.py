"""Holds the inputs and outputs of a pipeline: questions, turns of a conversation, sources, answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.results import Generation
from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.hit import Hit

if TYPE_CHECKING:
    from cacheblend_rag.engines.thoughts import Parts
    from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Turn:
    """Holds a question of a conversation, its answer, and the chunks in its prompt, as history of the next question.

    Example:
        Ask a question that needs the question before::

            first = rag.ask("Who founded the company?")
            turn = Turn("Who founded the company?", first.answer, first.sources)
            print(rag.ask("Where was she born?", history=[turn]).answer)
    """

    question: str
    answer: str
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Retrieved:
    """Holds a question's chunks, best first, each hit before its continuations, and the seconds of the retrieval."""

    hits: tuple[Hit, ...]
    seconds: float


@dataclass(frozen=True)
class RagAnswer:
    """Holds an answer and its sources.

    Attributes:
        answer: Text of the answer, without outer whitespace.
        sources: Chunks in the prompt, the most relevant first, and then the chunks without a score.
        generation: Report of the engine.
        retrieve_s: Seconds of retrieval.
        notes: Notes for the user, such as that sources were left out for lack of room.
        reasoning: Thoughts that the model wrote before the answer, if any (:mod:`cacheblend_rag.engines.thoughts`).
    """

    answer: str
    sources: tuple[Hit, ...]
    generation: Generation
    retrieve_s: float
    notes: tuple[str, ...] = ()
    reasoning: str = ""

    def turn(self, question: str) -> Turn:
        """Return the question and the answer in the form of the next question's ``history``."""
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
    """Holds a piece of a streamed answer, or of the thoughts before the answer.

    The first event carries the prompt and its sources, the last event the whole :class:`RagAnswer`.
    """

    text: str
    prompt: TokenizedPrompt | None = None
    sources: tuple[Hit, ...] | None = None
    answer: RagAnswer | None = None
    reasoning: str = ""


def unanswered(done: Generation, said: Parts) -> tuple[str, ...]:
    """Return a note if the model wrote thoughts but no answer, else an empty tuple."""
    if said.answer.strip() or not said.reasoning:
        return ()
    tokens = done.usage.completion_tokens
    return (f"no answer: the model was still thinking after {tokens} tokens. Give it more (max_tokens).",)


def check_question(question: str) -> None:
    """Raise InputError for an empty question, or a question with lone surrogates, which cannot be tokenised."""
    if not question.strip():
        raise InputError("The question is empty.")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"The question is not valid Unicode ({error}).") from None
