"""Reads or generates the questions for tuning a retriever, finds the chunks that answer them, and splits the questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from cacheblend_lab.rows import Skipped, read_rows
from cacheblend_rag.calibrate.metrics import f1, normalize
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.index import ChunkIndex

FORMAT = (
    'A row is {"question": "...", "answers": ["..."]}; a file of LlamaIndex\'s EmbeddingQAFinetuneDataset is read, too.'
)
MIN_QUESTIONS = 40
_SHARES = (0.6, 0.15)  # shares of train and dev; the rest is held out


@dataclass(frozen=True)
class TuningQuestion:
    """Holds a question with known answers or known chunks.

    Attributes:
        answers: Acceptable answers; empty if only the chunks are known.
        relevant: Ids of the chunks that answer the question; empty if unknown: then chunks that contain an answer
            count.
        group: Group of questions on one subject, which a split never separates.
    """

    text: str
    answers: tuple[str, ...] = ()
    relevant: frozenset[str] = frozenset()
    group: str = ""

    def answered_by(self, chunk: Chunk) -> bool:
        """Return whether a chunk is relevant or, if no relevant chunks are known, contains an answer."""
        if self.relevant:
            return chunk.id in self.relevant
        text = f" {normalize(chunk.text)} "
        return any(f" {normalize(answer)} " in text for answer in self.answers)


@dataclass(frozen=True)
class TuningQuestionFile:
    """Holds a file's questions, and the rows that cannot be used."""

    questions: list[TuningQuestion]
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Split:
    """Holds the questions to train on, to stop early by (dev) and to evaluate with; no group is in two of the parts."""

    train: list[TuningQuestion]
    dev: list[TuningQuestion]
    held_out: list[TuningQuestion]


def read_questions(file: Path, index: ChunkIndex) -> TuningQuestionFile:
    """Read JSON lines (or a JSON array) of questions with answers, or LlamaIndex's ``EmbeddingQAFinetuneDataset``.

    Raises:
        InputError: The file cannot be read, or none of its rows can be used.
    """
    found = read_rows(from_home(file))
    if len(found.rows) == 1 and {"queries", "relevant_docs"} <= found.rows[0][1].keys():
        read = _llama_index(file.name, found.rows[0][1], index)
    elif {"queries", "corpus", "relevant_docs"} <= {where.removeprefix("row ") for where, _ in found.rows}:
        parts = {where.removeprefix("row "): row for where, row in found.rows}
        read = _llama_index(file.name, parts, index)
    else:
        read = TuningQuestionFile([], list(found.skipped))
        for where, row in found.rows:
            try:
                read.questions.append(_question(row))
            except (TypeError, ValueError, KeyError) as error:
                why = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
                read.skipped.append(Skipped(file.name, where, why))
    if not read.questions:
        because = f" ({read.skipped[0].where}: {read.skipped[0].why})" if read.skipped else ""
        raise InputError(f"{file} has no question that can be used{because}. {FORMAT}")
    return read


def _question(row: Mapping[str, Any]) -> TuningQuestion:
    given = row["answers"] if "answers" in row else row["answer"]
    answers = [given] if isinstance(given, str) else list(given)
    if not isinstance(row["question"], str) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("question and answers must be strings")
    kept = tuple(answer.strip() for answer in answers if normalize(answer))
    if not row["question"].strip() or not kept:
        raise ValueError("the question or its answer is empty")
    return TuningQuestion(row["question"].strip(), kept, group=str(row.get("group", "")))


def _llama_index(name: str, data: Mapping[str, Any], index: ChunkIndex) -> TuningQuestionFile:
    """Read an ``EmbeddingQAFinetuneDataset``; a node means all chunks whose text contains or is part of it."""
    chunks = list(index.chunks())
    texts: Mapping[str, str] = data.get("corpus", {})
    found: dict[str, frozenset[str]] = {
        node: frozenset(c.id for c in chunks if text.strip() in c.text or c.text in text)
        for node, text in texts.items()
        if text.strip()
    }
    read = TuningQuestionFile([])
    for number, question in data["queries"].items():
        nodes = data["relevant_docs"].get(number, ())
        relevant = frozenset[str]().union(*(found.get(node, frozenset()) for node in nodes))
        if relevant:
            read.questions.append(TuningQuestion(question, (), relevant, group=str(min(nodes))))
        else:
            read.skipped.append(Skipped(name, f"query {number}", "none of its nodes is a chunk of the index"))
    return read


def split_questions(questions: Sequence[TuningQuestion], seed: int) -> Split:
    """Split questions by groups, drawn by ``seed``: 60% of the groups for training, 15% for dev, 25% held out.

    Raises:
        InputError: There are fewer than 40 questions or 8 groups.
    """
    groups: dict[str, list[TuningQuestion]] = {}
    for question in questions:
        groups.setdefault(question.group or question.text, []).append(question)
    if len(questions) < MIN_QUESTIONS or len(groups) < 8:
        raise InputError(
            f"{len(questions)} questions in {len(groups)} groups are too few to tune with and to judge by; give at least "
            f"{MIN_QUESTIONS} in 8, or let the reader write them: --generate 500."
        )
    names = sorted(groups)
    Random(seed).shuffle(names)
    first, second = (round(len(names) * share) for share in (_SHARES[0], sum(_SHARES)))
    parts = (names[:first], names[first:second], names[second:])
    return Split(*([question for name in part for question in groups[name]] for part in parts))


REQUEST = "Write one short question that these notes answer. Reply with the question alone."
_ANSWER = SamplingParams(max_tokens=32, stop=("\n",))
_ALIKE = 0.5  # lowest F1 of two answers that count as equal
_TRIES = 4  # chunks tried for each wanted question
_SHORTEST = 3  # fewest words of a question
_HOPELESS = 60  # tries after which generation stops if fewer than one question in ten was kept

Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class Generated:
    """Holds the questions that the reader wrote.

    Attributes:
        questions: Questions that passed the filter; the relevant chunk of each is its source chunk.
        unanswered: Number of questions that the reader could not answer from their source chunk.
        lost: Number of questions for which the whole index returned another chunk or another answer.
    """

    questions: list[TuningQuestion]
    tried: int
    empty: int
    unanswered: int
    lost: int


def generate_questions(pipeline: RagPipeline, count: int, seed: int, progress: Progress) -> Generated:
    """Let the reader write up to ``count`` questions, each from one chunk drawn by ``seed``.

    The reader answers each question from its chunk alone, and from the whole index as `cacheblend ask` does. A question
    is kept if retrieval finds its chunk and the two answers agree.

    Raises:
        InputError: Nothing is indexed, or fewer than one question in ten was kept.
    """
    chunks = list(pipeline.chunks.chunks())
    if not chunks:
        raise InputError(f"Nothing is indexed in {pipeline.chunks.directory} yet; index some documents first.")
    rng = Random(seed)
    drawn = [rng.choice(chunks) for _ in range(count * _TRIES)]
    kept: dict[str, TuningQuestion] = {}
    empty = unanswered = lost = tried = 0
    for number, chunk in enumerate(drawn):
        progress(len(kept), count, f"chunk {number + 1}")
        if len(kept) == count or (tried >= _HOPELESS and len(kept) * 10 < tried):
            break
        tried += 1
        text = _write(pipeline, chunk, seed + number)
        if len(text.split()) < _SHORTEST or text in kept:
            empty += 1
            continue
        answer = _answer(pipeline, chunk, text)
        if not normalize(answer):
            unanswered += 1
        elif not _comes_back(pipeline, chunk, text, answer):
            lost += 1
        else:
            kept[text] = TuningQuestion(text, (answer,), frozenset([chunk.id]), chunk.id)
    progress(count, count, "")
    found = Generated(list(kept.values()), tried, empty, unanswered, lost)
    if len(kept) * 10 < tried:
        raise InputError(
            f"Of {tried} questions that the reader wrote {len(kept)} came back ({empty} were no question, {unanswered} it could "
            f"not answer, {lost} did not find their chunk or their answer again). Use a larger --model, or give --questions."
        )
    return found


def _write(pipeline: RagPipeline, chunk: Chunk, seed: int) -> str:
    engine = pipeline.engine
    if getattr(engine.tokenizer, "chat_template", None) and not _continues(pipeline):
        prompt = rag_prompt(engine.tokenizer, [chunk], REQUEST, pipeline.instruction)
    else:
        # A base model follows no request: the prompt ends where the question begins, and the model continues it.
        asked = rag_prompt(engine.tokenizer, [chunk], "\0", pipeline.instruction)
        *before, last = asked.segments
        assert isinstance(last, str)
        prompt = BlendPrompt((*before, last.partition("\0")[0].rstrip()))
    sampling = SamplingParams(max_tokens=48, temperature=0.7, seed=seed, stop=("\n",))
    written = generate_answer(engine, prompt, sampling).text
    return written.strip().removeprefix("Question:").strip().strip('"')


def _continues(pipeline: RagPipeline) -> bool:
    """Return whether a question's prompt ends in ``Answer:``, as prompts for models without chat turns do."""
    last = rag_prompt(pipeline.engine.tokenizer, [], "x", pipeline.instruction).segments[-1]
    return isinstance(last, str) and last.rstrip().endswith("Answer:")


def _answer(pipeline: RagPipeline, chunk: Chunk, question: str) -> str:
    prompt = rag_prompt(pipeline.engine.tokenizer, [chunk], question, pipeline.instruction)
    return generate_answer(pipeline.engine, prompt, _ANSWER).text.strip()


def _comes_back(pipeline: RagPipeline, chunk: Chunk, question: str, answer: str) -> bool:
    found = pipeline.ask(question, _ANSWER)
    same = f1(found.answer.split("\n")[0], [answer]) >= _ALIKE
    return same and chunk.id in {source.id for source in found.sources}
