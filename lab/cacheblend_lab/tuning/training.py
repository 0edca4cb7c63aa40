"""Trains a query encoder on the reader's scores, and stops early when the dev questions improve no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import torch

from cacheblend_lab.marginal import log_marginal
from cacheblend_lab.tuning.candidates import CandidateChunks, LearnedCandidates, Rehearsal, StoredCandidates
from cacheblend_lab.tuning.judging import Searched, ranks, recall, reciprocal
from cacheblend_lab.tuning.questions import TuningQuestion
from cacheblend_lab.tuning.students import PARTS, STUDENTS, Both, Part, Student
from cacheblend_lab.tuning.teacher import Judged
from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex

Loss = Literal["marginal", "kl", "infonce"]
LOSSES: Final[tuple[str, ...]] = get_args(Loss)
"""Names of the losses of a query encoder over a question's candidates; the null document is one of the candidates.

All losses take the relevance f(x, z) as logits and the reader's log p(y|z, x), both ``[questions, candidates]``. p(z|x)
is the softmax of f over the candidates, from the current parameters (REALM, section 3.1).
"""


def marginal_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log p(y|x)."""
    return -log_marginal(relevance, reader).mean()


def kl_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean KL of p(z|x) from the reader's likelihoods, normalised over the candidates (REPLUG)."""
    wanted = reader.log_softmax(-1)
    return torch.nn.functional.kl_div(relevance.log_softmax(-1), wanted, log_target=True, reduction="batchmean")


def infonce_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the candidate with the reader's highest likelihood; the others are negatives.

    Candidates with more than half of the highest likelihood are left out.
    """
    best = reader.max(-1, keepdim=True)
    rivals = reader > best.values - torch.log(torch.tensor(2.0))
    rivals = rivals.scatter(-1, best.indices, False)
    logits = relevance.masked_fill(rivals, float("-inf"))
    return torch.nn.functional.cross_entropy(logits, best.indices[:, 0])


def loss_of(name: Loss, relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the loss called ``name``."""
    return {"marginal": marginal_loss, "kl": kl_loss, "infonce": infonce_loss}[name](relevance, reader)


Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class TrainSettings:
    """Holds the settings of training.

    Attributes:
        epochs: Most rounds over the questions; None takes the default of the part.
        patience: Number of rounds without a better MRR on the dev questions after which training stops.
        batch: Questions in a step; None takes the default of the part.
        temperature: Divisor that turns cosine similarities into f(x, z).
    """

    loss: Loss = "marginal"
    part: Part = "adapter"
    epochs: int | None = None
    patience: int = 3
    batch: int | None = None
    temperature: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for values out of range."""
        if self.loss not in LOSSES:
            raise InputError(f"There is no loss {self.loss!r}; choose {', '.join(LOSSES)}.")
        if self.part not in PARTS:
            raise InputError(f"{self.part!r} cannot be tuned; choose {', '.join(PARTS)}.")
        if min(self.rounds, self.patience, self.size) < 1 or self.temperature <= 0:
            raise InputError("epochs, patience and batch must be at least 1, and temperature above 0.")

    @property
    def rounds(self) -> int:
        """Return the most rounds over the questions."""
        return STUDENTS[self.part].epochs if self.epochs is None else self.epochs

    @property
    def size(self) -> int:
        """Return the number of questions in a step."""
        return STUDENTS[self.part].batch if self.batch is None else self.batch


@dataclass(frozen=True)
class Point:
    """Holds a point of the training curve: step, mean loss since the last point, and retrieval of the dev questions."""

    step: int
    loss: float | None
    recall_at_5: float
    mrr: float


class Lessons:
    """Takes training steps, each over some questions and their candidates."""

    def __init__(
        self,
        student: Student,
        judged: Sequence[Judged],
        index: ChunkIndex,
        embedder: Embedder,
        settings: TrainSettings,
    ):
        """Prepare to train ``student`` in place."""
        self._student, self._settings = student, settings
        self._device = torch.device(str(student.model.device))
        self._candidates: CandidateChunks
        if isinstance(student, Both):
            self._candidates = LearnedCandidates(judged, index, embedder, student, settings.seed)
        else:
            self._candidates = StoredCandidates(judged, index, embedder, self._device)
        self._texts = [each.question.text for each in judged]
        self._optimiser = torch.optim.AdamW(student.parameters(), lr=student.rate(0.0), weight_decay=0.01)

    def step(self, rows: Sequence[int], done: float) -> float:
        """Take a step on the questions numbered ``rows``, after a share ``done`` of all steps; return the mean loss."""
        vectors = self._student.encode([self._texts[row] for row in rows])
        relevance, reader = self._candidates.of(torch.tensor(rows, device=self._device), vectors)
        loss = loss_of(self._settings.loss, relevance / self._settings.temperature, reader)
        self._optimiser.param_groups[0]["lr"] = self._student.rate(done)
        self._optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        self._optimiser.step()
        return float(loss.detach())


def train(
    student: Student,
    judged: Sequence[Judged],
    dev: Sequence[TuningQuestion],
    index: ChunkIndex,
    embedder: Embedder,
    settings: TrainSettings,
    progress: Progress,
) -> list[Point]:
    """Train ``student`` in place, and restore the weights of its best point (the start, if no point was better).

    Returns:
        The training curve; the first point is the start.
    """
    torch.manual_seed(settings.seed)
    lessons = Lessons(student, judged, index, embedder, settings)
    searched: Searched = Rehearsal(index, dev, embedder, student) if isinstance(student, Both) else index
    curve = [_point(student, dev, searched, 0, None)]
    best, kept, step = 0, student.state(), 0
    steps = settings.rounds * -(-len(judged) // settings.size)
    for epoch in range(settings.rounds):
        progress(epoch, settings.rounds, "")
        losses = []
        for number, rows in enumerate(torch.split(torch.randperm(len(judged)), settings.size)):
            losses.append(lessons.step(rows.tolist(), step / steps))
            step += 1
            if student.documents:  # steps that embed chunks are slow
                progress(epoch + (number + 1) * settings.size / len(judged), settings.rounds, "")
        curve.append(_point(student, dev, searched, step, float(np.mean(losses))))
        if curve[-1].mrr > curve[best].mrr:
            best, kept = len(curve) - 1, student.state()
        elif len(curve) - 1 - best >= settings.patience:
            break
    student.model.load_state_dict(kept)
    student.model.eval()
    progress(settings.rounds, settings.rounds, "")
    return curve


def _point(student: Student, dev: Sequence[TuningQuestion], searched: Searched, step: int, loss: float | None) -> Point:
    if isinstance(searched, Rehearsal):
        searched.embed()
    found = ranks(searched, dev, student.vectors([question.text for question in dev]))
    return Point(step, loss, float(np.mean(recall(found, 5))), float(np.mean(reciprocal(found))))
