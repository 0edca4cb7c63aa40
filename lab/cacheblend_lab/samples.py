"""Defines a data set's rows: samples with documents before preparation, cases with prompts after preparation."""

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
    """Holds a question and the texts to answer it from.

    Attributes:
        question: The question; for summaries the request.
        answers: Acceptable answers; a summary's reference.
        texts: Documents, examples or chunks.
        packing: ``"split"`` joins the texts and cuts them into chunks; ``"pack"`` fills chunks with whole texts
            (few-shot examples must not be cut); ``"ready"`` takes each text as a chunk.
        group: Samples of one group share their texts; confidence intervals resample groups.
        instruction: First sentence of the prompt, equal for every sample of a data set.
        where: The row that the sample was read from, as ``line 3``; empty for a generated sample.
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
    """Holds a sample that is ready to be answered.

    Attributes:
        left_out: Number of retrieved chunks that did not fit the context window.
        similarity: Cosine similarity of each chunk to the question; None if no chunks were retrieved.
    """

    sample: Sample
    chunks: Sequence[Chunk]
    prompt: BlendPrompt
    max_tokens: int
    left_out: int = 0
    similarity: tuple[float, ...] | None = None
