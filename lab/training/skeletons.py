"""Draws the texts around chunks and questions in training: the native prompt's, and those of other frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

NATIVE_INSTRUCTION: Final = "Answer from the notes."


@dataclass(frozen=True)
class Skeleton:
    """Holds the text pieces of one prompt; each piece is tokenised separately.

    Attributes:
        opening: Text before the first chunk.
        label: Text in front of every chunk, with the slot `{n}`.
        separator: Text between two chunks.
        closing: Text between the last chunk and the first question.
        question: Text of a question, with the slot `{q}`, up to the answer.
        between: Text between an answer's `<eos>` and the next question.
    """

    opening: str = NATIVE_INSTRUCTION + "\n\n"
    label: str = ""
    separator: str = "\n\n"
    closing: str = "\n\n"
    question: str = "Question: {q}\nAnswer:"
    between: str = "\n\n"


NATIVE: Final = Skeleton()

_INSTRUCTIONS: Final = (
    "",
    "Answer the question from the documents below.",
    "Answer the question.",
    "Use the notes below to answer the question at the end.",
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer with a few words from the given text.",
    "Read the documents and answer shortly.",
    "Use only the following pieces of context to answer the question.",
    "Here are some notes.",
    "Documents:",
    "Context:",
    "Reply with the answer only.",
)
_LABELS: Final = ("[{n}] ", "Document {n}:\n", "Note {n}: ", "[Document {n}]\n", "Source {n}\n\n", "- ")
_QUESTIONS: Final = (
    "Question: {q}\nAnswer:",
    "{q}\nAnswer:",
    "Query: {q}\nAnswer:",
    "Question: {q}\n\nAnswer:",
    "Q: {q}\nAnswer:",
    "Question: {q} Answer:",
    "Query: {q}\nAnswer: ",
    "User question: {q}\nAnswer:",
)
_RULE: Final = "---------------------"
_CONTEXT_OPENING: Final = f"Context information is below.\n{_RULE}\n"
_CONTEXT_CLOSING: Final = (
    f"\n{_RULE}\nGiven the context information and not prior knowledge, answer the query.\n",
    f"\n{_RULE}\nUse the context information to answer the query.\n",
)


def sample_skeleton(rng: Random, native_share: float = 0.6) -> Skeleton:
    """Draw a skeleton; it is the native skeleton with probability `native_share`."""
    draw = rng.random()
    if draw < native_share:
        return NATIVE
    if draw < native_share + (1 - native_share) * 0.25:
        opening = rng.choice(("", "You are a helpful assistant.\n\n")) + _CONTEXT_OPENING
        question = "Query: {q}\nAnswer:" + rng.choice(("", " "))
        return Skeleton(opening, "", "\n\n", rng.choice(_CONTEXT_CLOSING), question, "\n\n")
    instruction = rng.choice(_INSTRUCTIONS)
    gap = rng.choice(("\n\n", "\n\n", "\n", " "))
    label = rng.choice(_LABELS) if rng.random() < 0.3 else ""
    separator = rng.choice(("\n\n", "\n\n", "\n", "\n\n\n", "\n---\n", " "))
    return Skeleton(
        instruction + gap if instruction else "",
        label,
        separator,
        rng.choice(("\n\n", "\n\n", "\n", "\n\n\n")),
        rng.choice(_QUESTIONS),
        rng.choice(("\n\n", "\n")),
    )


def all_texts() -> list[str]:
    """Return all fixed texts of skeletons, for the tokenizer's training."""
    return [
        NATIVE_INSTRUCTION,
        *_INSTRUCTIONS,
        *_LABELS,
        *_QUESTIONS,
        _CONTEXT_OPENING,
        *_CONTEXT_CLOSING,
        "1 2 3 4 5 6 7 8 9",
    ]
