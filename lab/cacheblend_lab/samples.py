"""Defines a data set's rows: samples with documents before preparation, cases with prompts behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, BlendPrompt

Task = Literal["qa", "summary", "dialogue"]
Packing = Literal["split", "pack", "ready"]


@dataclass(frozen=True)
class Sample:
    """A question and the texts it is to be answered from.

    Attributes:
        id: Unique in its data set.
        question: The question; for summaries what is asked for.
        answers: Acceptable answers; a summary's reference.
        texts: Documents, examples or chunks.
        packing: ``"split"`` joins the texts and cuts them into chunks; ``"pack"`` fills chunks with whole texts (few-shot
            examples must not be cut); ``"ready"`` takes each text as a chunk.
        task: Decides how long an answer may be and how it is scored.
        kind: Kind of question, reported apart; empty if the data set tells none.
        group: Samples of one group share their texts; confidence intervals resample groups.
        instruction: First sentence of the prompt; every sample of a data set has the same.
        where: The row it was read from, as ``line 3``; empty for a generated one.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    packing: Packing = "split"
    task: Task = "qa"
    kind: str = ""
    group: str = ""
    instruction: str = DEFAULT_INSTRUCTION
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class EvalCase:
    """A sample ready to be answered.

    Attributes:
        sample: Where it comes from.
        chunks: Chunks in the prompt, in its order.
        prompt: Instruction, chunks and question.
        max_tokens: Most tokens of an answer.
        left_out: Retrieved chunks that did not fit the context window.
        similarity: Cosine similarity of each chunk to the question; None where there was nothing to choose from.
    """

    sample: Sample
    chunks: Sequence[Chunk]
    prompt: BlendPrompt
    max_tokens: int
    left_out: int = 0
    similarity: tuple[float, ...] | None = None
