"""Generates questions with the reader, and keeps those that retrieve their chunk and answer (round-trip filtering)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_rag.calibrate.metrics import f1, normalize
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.rag.pipeline import RagPipeline

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
