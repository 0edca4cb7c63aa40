"""Scores each candidate chunk by the reader: log p(y|z, x) over the chunk's stored KV, written to disk per question."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from cacheblend_lab.evaluation.answers import AnswersFile
from cacheblend_lab.scoring import score
from cacheblend_lab.spelling import answer_ids
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.base import Closing

NOT_RELEVANT: Final = -20.0
"""Log-likelihood of an irrelevant chunk if the relevant chunks are known and there is no answer to score."""

Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class Judged:
    """Holds a question and the reader's scores of its candidates.

    Attributes:
        chunks: Ids of the candidates, best first.
        logprobs: log p(y|z, x) of each candidate, then of no chunk (the null document).
    """

    question: TuningQuestion
    chunks: tuple[str, ...]
    logprobs: tuple[float, ...]


def reader_logprobs(
    engine: BlendEngine, index: ChunkIndex, question: TuningQuestion, chunks: Sequence[str], instruction: str
) -> list[float]:
    """Return log p(y|z, x) of each chunk, then of no chunk, where y is any of the question's answers.

    A prompt's header and its one chunk are an exact prefix with stored KV, so only question and answers are computed.
    """
    answers = [answer_ids(engine.tokenizer, answer) for answer in question.answers]
    prompts = [
        rag_prompt(engine.tokenizer, held, question.text, instruction)
        for held in (*([index.chunk(name)] for name in chunks), [])
    ]
    return [float(np.logaddexp.reduce([each.logprob for each in score(engine, prompt, answers)])) for prompt in prompts]


class Teacher(Closing):
    """Judges questions and writes each judgement to a file, so that an interrupted run loses at most one question."""

    def __init__(
        self, engine: BlendEngine, index: ChunkIndex, instruction: str, candidates: int, file: Path | None = None
    ):
        """Open the file of judgements; None writes no file. Candidates are nearest by the index's own embedding model.

        Raises:
            InputError: The file holds judgements of another reader or instruction.
        """
        self._engine, self._index, self._instruction, self._count = engine, index, instruction, candidates
        reader = {"reader": engine.fingerprint.digest, "header": list(engine.header_ids), "instruction": instruction}
        self._kept = AnswersFile(file, reader)
        self._known: dict[str, Any] = {row["id"]: row for row in self._kept.rows}

    def judge(
        self, questions: Sequence[TuningQuestion], vectors: np.ndarray[Any, Any], progress: Progress
    ) -> list[Judged]:
        """Judge questions with unit vectors ``[questions, dim]``; earlier judgements are reused from the file."""
        found = []
        for number, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
            progress(number, len(questions), "")
            chunks = [name for name, _ in self._index.nearest(vector, self._count)]
            found.append(self._judge(question, chunks))
        progress(len(questions), len(questions), "")
        return found

    def _judge(self, question: TuningQuestion, chunks: list[str]) -> Judged:
        if not question.answers:
            # Without an answer to score, relevant chunks get log-likelihood 0, and must be among the candidates.
            chunks = list(dict.fromkeys([*sorted(question.relevant), *chunks]))[: self._count]
            marks = [0.0 if name in question.relevant else NOT_RELEVANT for name in chunks]
            return Judged(question, tuple(chunks), (*marks, NOT_RELEVANT))
        key = _key(question, chunks)
        if key not in self._known:
            logprobs = reader_logprobs(self._engine, self._index, question, chunks, self._instruction)
            self._known[key] = {"id": key, "question": question.text, "logprobs": logprobs}
            self._kept.add([self._known[key]])
        return Judged(question, tuple(chunks), tuple(self._known[key]["logprobs"]))

    def close(self) -> None:
        """Close the file."""
        self._kept.close()


def _key(question: TuningQuestion, chunks: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([question.text, *question.answers, *chunks]).encode())
