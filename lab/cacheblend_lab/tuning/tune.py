"""Tunes a retriever from end to end: judges, trains, compares before and after, and saves only a better encoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from cacheblend_lab.scoring import can_score
from cacheblend_lab.tuning.candidates import NEAREST
from cacheblend_lab.tuning.card import TuneResult, example, write_card
from cacheblend_lab.tuning.judging import DocstringTask, Gain, Vectors, gain, gains, ranks
from cacheblend_lab.tuning.questions import Split, TuningQuestion, split_questions
from cacheblend_lab.tuning.saving import check_free, put_in_place, unfinished, write_model, write_report
from cacheblend_lab.tuning.students import STUDENTS, Student
from cacheblend_lab.tuning.teacher import Judged, Teacher
from cacheblend_lab.tuning.training import Lessons, TrainSettings, train
from cacheblend_rag import __version__
from cacheblend_rag.calibrate.metrics import exact_match, f1
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.homes import from_home
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

_TRIED: Final = 16


def timed(work: Callable[[], object]) -> float:
    """Call ``work`` and return how many seconds the call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def estimate_training(
    split: Split, vectors: Vectors, index: ChunkIndex, embedder: Embedder, settings: TrainSettings
) -> float:
    """Take two steps with a temporary student; return an upper estimate of the seconds that training takes.

    ``vectors`` are those of the questions in ``split.train``, ``[questions, dim]``.
    """
    student = STUDENTS[settings.part](embedder.model)
    asked = zip(split.train[: settings.size], vectors, strict=False)
    batch = [_unread(question, vector, index) for question, vector in asked]
    lessons = Lessons(student, batch, index, embedder, settings)
    rows = range(len(batch))
    lessons.step(rows, 0.0)  # warm up
    step = timed(lambda: lessons.step(rows, 0.0))
    seconds = step * settings.rounds * -(-len(split.train) // settings.size)
    if student.documents:  # the student embeds chunks before the first round and after each round
        seconds += (settings.rounds + 1) * estimate_embedding(index, embedder, len(split.dev) * NEAREST)
    return seconds


def _unread(question: TuningQuestion, vector: Vectors, index: ChunkIndex) -> Judged:
    chunks = tuple(name for name, _ in index.nearest(vector, _TRIED))
    return Judged(question, chunks, (0.0,) * (len(chunks) + 1))


def estimate_embedding(index: ChunkIndex, embedder: Embedder, most: int | None = None) -> float:
    """Embed some chunks; return the estimated seconds for all chunks, or for at most ``most`` chunks."""
    texts = [chunk.text for chunk, _ in zip(index.chunks(), range(_TRIED), strict=False)]
    count = index.count() if most is None else min(most, index.count())
    return timed(lambda: embedder.texts(texts)) * count / max(1, len(texts))


def estimate_checking(embedder: Embedder, elsewhere: int, times: int) -> float:
    """Search a few out-of-domain passages; return the estimated seconds of ``times`` searches of ``elsewhere`` ones."""

    def check() -> None:
        task = DocstringTask(embedder, _TRIED)
        task.ranks(embedder.questions(task.questions))

    check()  # warm up: the first call collects the passages
    return timed(check) * times * elsewhere / _TRIED


def in_words(seconds: float) -> str:
    """Return a duration as text, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def total(parts: Sequence[tuple[str, float]]) -> str:
    """Return the sum of several durations as text, with each duration in brackets."""
    listed = ", ".join(f"{in_words(seconds)} {name}" for name, seconds in parts)
    return f"{in_words(sum(seconds for _, seconds in parts))} ({listed})"


MOST_LOST: Final = 0.01
"""Largest loss of recall@5 out of domain: one point. Weights step back beforehand until MRR loses no more, either."""
_ROUNDING: Final = 1e-9  # tolerance for shares of counts: 299 - 295 of 400 is exactly one point
_SHARES: Final = (1.0, 0.75, 0.5, 0.35, 0.25)  # shares of the learned change of weights to try
_SHORT = SamplingParams(max_tokens=32, stop=("\n",))

Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class TuneSettings:
    """Holds the settings of tuning.

    Attributes:
        candidates: Chunks that the reader judges for each question, besides the null document.
        answers: Most held-out questions to answer before and after; 0 for none.
        elsewhere: Number of passages of the out-of-domain task.
    """

    training: TrainSettings = field(default_factory=TrainSettings)
    candidates: int = 16
    seed: int = 0
    answers: int = 200
    elsewhere: int = 400

    def __post_init__(self) -> None:
        """Raise `InputError` for values out of range."""
        if self.candidates < 2 or self.answers < 0 or self.elsewhere < 1:
            raise InputError("Give at least 2 candidates, 1 passage elsewhere, and 0 or more answers.")


def tune(
    pipeline: RagPipeline,
    questions: Sequence[TuningQuestion],
    output: Path,
    settings: TuneSettings | None = None,
    progress: Callable[[str], Progress] | None = None,
    say: Callable[[str], None] | None = None,
) -> TuneResult:
    """Tune the encoder of a pipeline's index to find the chunks that help the pipeline's reader.

    Neither the index nor a chunk's KV changes; an encoder that embeds documents is evaluated on a copy of the index.
    The reader's judgements are written to a file beside ``output``, from which an interrupted run resumes.

    Args:
        pipeline: Index and reader; the pipeline must use the index's own embedding model.
        questions: Questions to split into train, dev and held out; see :func:`split_questions`.
        output: A new directory for the query encoder.
        settings: Settings of the tuning.
        progress: Takes the name of a step, and returns a function to call with the amount done, the total and a note.
        say: Called with the estimated duration before the work begins.

    Returns:
        Gains, verdict and settings.

    Raises:
        InputError: The engine cannot score, the output exists already, or there are too few questions.
        StoreError: A directory or file cannot be written.
    """
    settings = settings or TuneSettings()
    output = from_home(output)
    check_free(output)
    if not can_score(pipeline.engine) and any(question.answers for question in questions):
        raise InputError(
            f"{type(pipeline.engine).__name__} cannot score answers; tune with TransformersEngine or VLLMEngine."
        )
    run = _TuneRun(pipeline, output, settings, progress or (lambda name: lambda done, total, at: None))
    return run.tune(questions, say or (lambda text: None))


class _TuneRun:
    def __init__(
        self, pipeline: RagPipeline, output: Path, settings: TuneSettings, progress: Callable[[str], Progress]
    ):
        self._pipeline, self._output, self._settings, self._progress = pipeline, output, settings, progress
        self._index = pipeline.chunks
        self._embedder = self._index.load_embedder()
        self._seconds: dict[str, float] = {}

    def tune(self, questions: Sequence[TuningQuestion], say: Callable[[str], None]) -> TuneResult:
        split = split_questions(questions, self._settings.seed)
        base = self._embedder.questions([question.text for question in split.held_out])
        begin = time.perf_counter()
        file = self._output.with_name(f"{self._output.name}.scores.jsonl")
        engine, count = self._pipeline.engine, self._settings.candidates
        with Teacher(engine, self._index, self._pipeline.instruction, count, file) as teacher:
            vectors = self._embedder.questions([question.text for question in split.train])
            say(self._estimate(split, teacher, vectors))
            judged = teacher.judge(split.train, vectors, self._progress("Judging"))
        self._took("judging", begin)
        begin = time.perf_counter()
        training = self._settings.training
        student = STUDENTS[training.part](self._embedder.model)
        start = student.state()
        curve = train(student, judged, split.dev, self._index, self._embedder, training, self._progress("Training"))
        kept = self._step_back(student, start)
        self._took("training", begin)
        with unfinished(self._output) as directory:
            about = {"embedding": self._embedder.name, "documents": student.documents}
            write_model(student.model, directory, about)
            with self._tuned(student, directory) as tuned:
                after = ranks(tuned, split.held_out, student.vectors([question.text for question in split.held_out]))
                groups = [question.group for question in split.held_out]
                held_out = gains(ranks(self._index, split.held_out, base), after, groups)
                shown = example(judged, self._index, tuned, training.temperature)
                held_out |= self._answers(split.held_out, tuned)  # closes `tuned`
            elsewhere = self._out_of_domain(student)
            saved, why = verdict(held_out["recall_at_5"], elsewhere["recall_at_5"])
            counts = {"train": len(split.train), "dev": len(split.dev), "held_out": len(split.held_out)}
            result = TuneResult(
                self._output if saved else None,
                student.documents,
                why,
                held_out,
                elsewhere,
                counts,
                judge_reader(judged, self._index),
                curve,
                shown,
                self._seconds,
                {**self._describe(), "kept": kept},
            )
            if saved:
                write_report(directory, {**about, **result.to_dict()})
                write_card(directory, result)
                put_in_place(directory, self._output)
        return result

    def _step_back(self, student: Student, start: dict[str, Any]) -> float:
        """Step the weights back until MRR out of domain loses at most a point; return the remaining share.

        The out-of-domain passages differ from the passages of the verdict.
        """
        task = DocstringTask(self._embedder, self._settings.elsewhere, others=True)
        before = task.ranks(self._embedder.questions(task.questions))
        learned = student.state()
        for kept in _SHARES:
            student.model.load_state_dict(learned)
            student.step_back(start, 1 - kept)
            after = self._elsewhere(student, task, others=True).ranks(student.vectors(task.questions))
            if gains(before, after, [""] * len(before))["mrr"].difference >= -MOST_LOST:  # MRR is finer than recall
                break
        return kept

    def _elsewhere(self, student: Student, task: DocstringTask, *, others: bool) -> DocstringTask:
        """Return the task for the student; a student that embeds documents also embeds the passages."""
        if not student.documents:
            return task
        return DocstringTask(Embedder(self._embedder.name, student.model), self._settings.elsewhere, others=others)

    @contextmanager
    def _tuned(self, student: Student, directory: Path) -> Iterator[ChunkIndex]:
        """Yield the index with the tuned query encoder, or a copy embedded by a student that embeds documents."""
        if not student.documents:
            with ChunkIndex(self._index.directory, None, directory) as index:
                yield index
            return
        begin = time.perf_counter()
        show, documents = self._progress("Embedding"), self._index.documents()
        config = replace(self._index.config, embedding=str(directory))
        with TemporaryDirectory(prefix="cacheblend-tuned-") as place, ChunkIndex(place, config) as index:
            for number, document in enumerate(documents):
                show(number, len(documents), "")
                index.add(document.path, document.digest, self._index.chunks_of(document.path))
            self._took("embedding", begin)
            yield index

    def _estimate(self, split: Split, teacher: Teacher, vectors: Vectors) -> str:
        """Time a small part of each step; return a text with the estimated duration of the whole run."""
        quiet, settings, training = self._progress("Trying"), self._settings, self._settings.training
        teacher.judge(split.train[:1], vectors[:1], quiet)  # warm up
        judging = timed(lambda: teacher.judge(split.train[1:2], vectors[1:2], quiet)) * len(split.train)
        learning = estimate_training(split, vectors, self._index, self._embedder, training)
        documents = STUDENTS[training.part].documents
        searches = 3 + len(_SHARES) if documents else 2
        checking = estimate_checking(self._embedder, settings.elsewhere, searches)
        parts = [("judging", judging), ("at most training", learning), ("checking elsewhere", checking)]
        if documents:
            parts.append(("embedding", estimate_embedding(self._index, self._embedder)))
        if answers := min(settings.answers, len(split.held_out)):
            answering = timed(lambda: _first_line(self._pipeline, split.held_out[0].text)) * 2 * answers
            parts.append(("answering", answering))
        return (
            f"{len(split.train)} questions to judge with {settings.candidates} chunks each, {len(split.dev)} to stop by, "
            f"{len(split.held_out)} held out: up to {total(parts)}"
        )

    def _took(self, part: str, begin: float) -> None:
        self._seconds[part] = time.perf_counter() - begin

    def _describe(self) -> dict[str, Any]:
        engine = self._pipeline.engine
        stats, training = self._index.stats(), self._settings.training
        return {
            **asdict(self._settings),
            "training": {**asdict(training), "epochs": training.rounds, "batch": training.size},
            "version": __version__,
            "reader": engine.fingerprint.name,
            "embedding": self._embedder.name,
            "store": str(self._index.directory),
            "chunks": stats.chunks,
        }

    def _answers(self, questions: Sequence[TuningQuestion], tuned: ChunkIndex) -> dict[str, Gain]:
        """Answer held-out questions as `cacheblend ask` does, before and after; return gains in ``em`` and ``f1``."""
        asked = [question for question in questions if question.answers][: self._settings.answers]
        if not asked:
            return {}
        begin = time.perf_counter()
        show = self._progress("Answering")
        with self._pipeline.over(tuned) as other:
            said = []
            for number, question in enumerate(asked):
                show(number, len(asked), "")
                said.append([_first_line(each, question.text) for each in (self._pipeline, other)])
        self._took("answering", begin)
        groups = [question.group for question in asked]
        found = {}
        for name, score in (("em", exact_match), ("f1", f1)):
            before, after = (
                [score(pair[side], question.answers) for pair, question in zip(said, asked, strict=True)]
                for side in (0, 1)
            )
            found[name] = gain(before, after, groups)
        return found

    def _out_of_domain(self, student: Student) -> dict[str, Gain]:
        begin = time.perf_counter()
        task = DocstringTask(self._embedder, self._settings.elsewhere)
        after = self._elsewhere(student, task, others=False)
        found = task.ranks(self._embedder.questions(task.questions)), after.ranks(student.vectors(task.questions))
        self._took("out of domain", begin)
        return gains(*found, [""] * len(task.questions))


def judge_reader(judged: Sequence[Judged], index: ChunkIndex) -> dict[str, float]:
    """Return the share of questions with a right candidate chunk, and how often the reader prefers a right chunk.

    The reader prefers a right chunk if the answer is likelier after that chunk than after any other chunk and after no
    chunk. The second share counts only questions with a right chunk among their candidates.
    """
    found = preferred = 0
    for each in judged:
        right = [each.question.answered_by(index.chunk(name)) for name in each.chunks]
        found += any(right)
        best = max(range(len(each.logprobs)), key=each.logprobs.__getitem__)
        preferred += best < len(right) and right[best]
    return {"right_chunk_among_candidates": found / len(judged), "prefers_it": preferred / max(1, found)}


def verdict(held_out: Gain, out_of_domain: Gain) -> tuple[bool, str]:
    """Return whether to save a tuned query encoder, judged by the gains in recall@5, and the reason."""
    if not held_out.sure:
        return False, "not better, not saved: on questions held out the gain in recall@5 may be chance"
    if out_of_domain.difference < -MOST_LOST - _ROUNDING:
        return False, "not saved: better on questions held out, but it loses more than a point out of domain"
    return True, "better on questions held out, and no worse out of domain"


def _first_line(pipeline: RagPipeline, question: str) -> str:
    try:
        return pipeline.ask(question, _SHORT).answer.split("\n")[0].strip()
    except CacheBlendError as error:
        raise InputError(f"The question {question!r:.80} cannot be answered: {error}") from error
