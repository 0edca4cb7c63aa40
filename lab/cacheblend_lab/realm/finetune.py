"""Fine-tunes query tower and reader on questions (paper section 3.3); the index stays fixed or is rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import xxhash
from torch import Tensor

from cacheblend_lab.marginal import log_marginal
from cacheblend_lab.realm.evaluate import Library, answer_likelihood, as_queries, read, retrieve, search
from cacheblend_lab.realm.index import PassageIndex, bring_index, link, newest_step
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Inputs, load_passages
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.renewal import PASSAGES, RenewedIndex, age
from cacheblend_lab.realm.runs import RunDirectory, Say, Stage, Told, train
from cacheblend_rag.errors import InputError

_STAGE = 2


@dataclass(frozen=True)
class FinetuneSettings:
    """Holds the settings of fine-tuning.

    Attributes:
        k: Passages read for each question; 5 in the paper.
        save_every: Steps between checkpoints, if ``refresh_every`` is 0.
        refresh_every: Steps between the checkpoints from which the index is rebuilt, with the document tower trained,
            too; 0 freezes index and document tower, as in the paper.
    """

    steps: int = 2000
    batch: int = 16
    rate: float = 3e-5
    k: int = 5
    save_every: int = 500
    refresh_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: A number is out of range.
        """
        for name, value in asdict(self).items():
            least = 0 if name == "refresh_every" else 1
            if name not in ("rate", "seed") and value < least:
                raise InputError(f"{name} is {value}; give at least {least}.")


def finetune(
    directory: Path,
    questions: Sequence[RealmQuestion],
    output: Path,
    settings: FinetuneSettings,
    device: torch.device,
    say: Say = lambda done, of, at: None,
) -> tuple[RealmModel, Library]:
    """Fine-tune a pre-trained model into another directory; a second call resumes a killed run.

    Args:
        directory: Output directory of :func:`pretrain`; it is not changed.
        questions: Questions to learn from.
        output: Directory for checkpoints, ``metrics.jsonl``, the passages and index of ``directory``, and the final
            model.
        settings: Settings of the fine-tuning.
        device: Device to train on.
        say: Called after each step.

    Returns:
        The fine-tuned model, and its passages with their index.

    Raises:
        InputError: ``questions`` is empty, ``output`` is ``directory``, or ``output`` holds a run with other settings.
        ModelError: ``directory`` holds no model.
        StoreError: Another run is active in ``output``.
    """
    if not questions:
        raise InputError("There are no questions to learn from.")
    if output.resolve() == directory.resolve():
        raise InputError(f"--output is the model's own directory, {directory}, which stays as it is; name another one.")
    run = RunDirectory(output)
    model = RealmModel.load(directory).to(device)
    library = open_library(directory, model)
    factory = RunDirectory(directory).settings().get("faiss", "Flat")
    asked = xxhash.xxh3_128_hexdigest(repr([*questions]).encode())
    how = asdict(settings) | {"model": str(directory.resolve()), "questions": asked, "faiss": factory}
    with run.alone(how):
        run.begin(how)
        _bring(directory, output)
        tuning = Finetuning(model, library, questions, settings, run, device)
        if settings.refresh_every:
            model.save(output)  # the process that rebuilds the index reads the shape from `output`
        with tuning.index.renewed(_STAGE, settings.steps if settings.refresh_every else 0, factory) as saved:
            stage = Stage(_STAGE, "fine-tuning", settings.steps, settings.rate, tuning.loss, tuning.learning, saved)
            train(run, model, stage, settings.refresh_every or settings.save_every, settings.seed, say)
        if settings.refresh_every:
            tuning.index.build(settings.steps, factory)
            library.index = tuning.index.newest()
        model.save(output)
    return model, library


def open_library(directory: Path, model: RealmModel) -> Library:
    """Return the passages of a model's directory with their newest index.

    Raises:
        InputError: The directory has no passages or no index.
    """
    return Library(load_passages(directory / PASSAGES), PassageIndex.load(directory / "index"), model)


def is_tuned(directory: Path) -> bool:
    """Return whether the model in a directory was fine-tuned, and so has a trained reader."""
    return any(row["stage"] == _STAGE for row in RunDirectory(directory).metrics())


class Finetuning:
    """Computes the loss of a step.

    Attributes:
        index: The run's index.
        learning: Trained parameters: all but the document tower's, or all if the index is rebuilt.
    """

    def __init__(
        self,
        model: RealmModel,
        library: Library,
        questions: Sequence[RealmQuestion],
        settings: FinetuneSettings,
        run: RunDirectory,
        device: torch.device,
    ):
        """Tokenize the questions and choose the parameters to train."""
        self._model, self._library, self._settings = model, library, settings
        self._questions = questions
        self._queries = as_queries(model, questions)
        self._collator = Collator(model.tokenizer, device)
        self.index = RenewedIndex(run, model, library.tokenized, self._collator)
        frozen = set() if settings.refresh_every else set(model.document.parameters())
        self.learning = [parameter for parameter in model.parameters() if parameter not in frozen]

    def loss(self, step: int) -> tuple[Tensor | None, Told]:
        """Return the mean -log p(y|x) of a batch's questions with an answer in a retrieved passage, and figures to log.

        The loss is None if no question of the batch has one.
        """
        rng = Random(f"{self._settings.seed}:{_STAGE}:{step}")
        drawn = [rng.randrange(len(self._questions)) for _ in range(self._settings.batch)]
        questions, queries = [self._questions[at] for at in drawn], [self._queries[at] for at in drawn]
        rows, relevance, told = self._retrieve(self._collator.queries(queries), step)
        spans, pairs = read(self._model, self._library, self._collator, queries, rows)
        likelihood = answer_likelihood(spans, pairs, self._library, questions, rows)
        answerable = (likelihood > -torch.inf).any(1)
        told["answerable"] = answerable.float().mean().item()
        if not answerable.any():
            return None, told
        return -log_marginal(relevance[answerable], likelihood[answerable]).mean(), told

    def _retrieve(self, queries: Inputs, step: int) -> tuple[list[list[int]], Tensor, Told]:
        """Return the passages of each question, f(x, z), and figures to log."""
        k = self._settings.k
        if not self._settings.refresh_every:
            return *retrieve(self._model, self._library, queries, k), {}
        index = self.index.newest()
        vectors = self._model.query(queries)
        rows = search(index, vectors, k)
        return rows, self._model.relevance(vectors, self.index.vectors(rows)), age(index, step)


def _bring(directory: Path, output: Path) -> None:
    """Link or copy the passages and the newest index of ``directory`` into ``output``."""
    if not (output / PASSAGES).exists():
        link(directory / PASSAGES, output / PASSAGES)
    if newest_step(output / "index") is None:
        bring_index(directory / "index", output / "index")
