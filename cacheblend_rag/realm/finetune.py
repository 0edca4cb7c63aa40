"""Open-QA fine-tuning (paper section 3.3): the index stays as it is, the query tower and the reader learn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from cacheblend_rag.errors import InputError
from cacheblend_rag.realm.index import PassageIndex
from cacheblend_rag.realm.inputs import Collator
from cacheblend_rag.realm.model import RealmModel
from cacheblend_rag.realm.passages import load_passages
from cacheblend_rag.realm.questions import Question
from cacheblend_rag.realm.reading import Library, answer_likelihood, as_queries, read, retrieve
from cacheblend_rag.realm.refresh import PASSAGES
from cacheblend_rag.realm.runs import RunDirectory, Say, Stage, Told, train
from cacheblend_rag.retrieval.marginal import log_marginal

_STAGE = 2


@dataclass(frozen=True)
class FinetuneSettings:
    """How to fine-tune.

    Attributes:
        steps: How many.
        batch: Questions in a step.
        rate: Learning rate.
        k: Passages read for each question; the paper's 5.
        save_every: Steps between checkpoints.
        seed: Of the order of questions.
    """

    steps: int = 2000
    batch: int = 16
    rate: float = 3e-5
    k: int = 5
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: One is out of range.
        """
        for name, value in asdict(self).items():
            if name not in ("rate", "seed") and value < 1:
                raise InputError(f"{name} is {value}; give at least 1.")


def finetune(
    directory: Path,
    questions: Sequence[Question],
    output: Path,
    settings: FinetuneSettings,
    device: torch.device,
    say: Say = lambda done, of, at: None,
) -> tuple[RealmModel, Library]:
    """Fine-tune a pre-trained model into another directory; called again after it was killed, go on where it was.

    Args:
        directory: What :func:`pretrain` wrote; it stays as it is.
        questions: What to learn from.
        output: Gets checkpoints, ``metrics.jsonl``, passages and index of ``directory``, and in the end the model.
        settings: How.
        device: Where.
        say: Told of each step.

    Raises:
        InputError: There are no questions, or another run's settings are in ``output``.
        ModelError: ``directory`` holds no model.
        StoreError: Another run is at work in ``output``.
    """
    if not questions:
        raise InputError("There are no questions to learn from.")
    if output.resolve() == directory.resolve():
        raise InputError(f"--output is the model's own directory, {directory}, which stays as it is; name another one.")
    run = RunDirectory(output)
    model = RealmModel.load(directory).to(device)
    library = open_library(directory, model)
    how = asdict(settings) | {"model": str(directory.resolve()), "questions": len(questions)}
    with run.alone(how):
        run.begin(how)
        _bring(directory, output)
        frozen = {id(parameter) for parameter in model.document.parameters()}
        learning = [parameter for parameter in model.parameters() if id(parameter) not in frozen]
        tuning = Finetuning(model, library, questions, settings, device)
        stage = Stage(_STAGE, "fine-tuning", settings.steps, settings.rate, tuning.loss, learning)
        train(run, model, stage, settings.save_every, settings.seed, say)
        model.save(output)
    return model, library


def open_library(directory: Path, model: RealmModel) -> Library:
    """Return the passages of a model's directory with their newest index.

    Raises:
        InputError: There are none.
    """
    return Library(load_passages(directory / PASSAGES), PassageIndex.load(directory / "index"), model)


def is_tuned(directory: Path) -> bool:
    """Say whether the model in a directory was fine-tuned, and has a reader."""
    return any(row["stage"] == _STAGE for row in RunDirectory(directory).metrics())


class Finetuning:
    """The loss of a step."""

    def __init__(
        self,
        model: RealmModel,
        library: Library,
        questions: Sequence[Question],
        settings: FinetuneSettings,
        device: torch.device,
    ):
        """Prepare."""
        self._model, self._library, self._settings = model, library, settings
        self._questions = questions
        self._queries = as_queries(model, questions)
        self._collator = Collator(model.tokenizer, device)

    def loss(self, step: int) -> tuple[Tensor | None, Told]:
        """Return -log p(y|x) of a batch, of the questions whose answer stands in a retrieved passage; None where none does."""
        rng = Random(f"{self._settings.seed}:{_STAGE}:{step}")
        drawn = [rng.randrange(len(self._questions)) for _ in range(self._settings.batch)]
        questions, queries = [self._questions[at] for at in drawn], [self._queries[at] for at in drawn]
        rows, relevance = retrieve(self._model, self._library, self._collator.queries(queries), self._settings.k)
        spans, pairs = read(self._model, self._library, self._collator, queries, rows)
        likelihood = answer_likelihood(spans, pairs, self._library, questions, rows)
        answerable = (likelihood > -torch.inf).any(1)
        told: Told = {"answerable": answerable.float().mean().item()}
        if not answerable.any():
            return None, told
        return -log_marginal(relevance[answerable], likelihood[answerable]).mean(), told


def _bring(directory: Path, output: Path) -> None:
    """Give ``output`` the passages and the newest index of ``directory``, as links where the file system has them."""
    newest = sorted((directory / "index").glob("step-*"))[-1]
    for source, target in (
        (directory / PASSAGES, output / PASSAGES),
        *((file, output / "index" / newest.name / file.name) for file in newest.iterdir()),
    ):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
