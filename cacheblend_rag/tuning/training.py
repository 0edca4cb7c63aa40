"""The training loop: a query encoder learns what the reader likes, and stops when questions kept apart find no more."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.tuning.judging import ranks, recall, reciprocal
from cacheblend_rag.tuning.losses import LOSSES, Loss, loss_of
from cacheblend_rag.tuning.questions import TuningQuestion
from cacheblend_rag.tuning.students import PARTS, Part, Student
from cacheblend_rag.tuning.teacher import Judged

Progress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        loss: See :mod:`cacheblend_rag.tuning.losses`.
        part: What is tuned; see :mod:`cacheblend_rag.tuning.students`.
        epochs: Most rounds over the questions.
        patience: Rounds without a better MRR of the questions kept apart, after which to stop.
        batch: Questions in a step.
        temperature: What cosine similarities are divided by to be f(x, z).
        seed: Of the order of questions.
    """

    loss: Loss = "marginal"
    part: Part = "adapter"
    epochs: int = 20
    patience: int = 3
    batch: int = 32
    temperature: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that are out of range."""
        if self.loss not in LOSSES:
            raise InputError(f"There is no loss {self.loss!r}; choose {', '.join(LOSSES)}.")
        if self.part not in PARTS:
            raise InputError(f"{self.part!r} cannot be tuned; choose {' or '.join(PARTS)}.")
        if min(self.epochs, self.patience, self.batch) < 1 or self.temperature <= 0:
            raise InputError("epochs, patience and batch must be at least 1, and temperature above 0.")


class Candidates:
    """The candidates' vectors of all questions, the null document's behind them: what f(x, z) is computed against.

    Each vector is held once. A chunk of several windows counts with the one that is nearest to the question, as in a search.
    """

    def __init__(self, judged: Sequence[Judged], index: ChunkIndex, embedder: Embedder, device: torch.device):
        """Read the chunks' vectors from the index; the null document is an empty text (REALM, section 3.4)."""
        (null,) = embedder.texts([""])
        windows = {"": null, **index.vectors_of(name for each in judged for name in each.chunks)}
        first, start = {}, 0
        for name, vectors in windows.items():
            first[name] = start
            start += len(vectors)
        most = max(len(each.chunks) for each in judged) + 1
        widest = max(map(len, windows.values()))
        slots = np.full((len(judged), most, widest), -1)
        reader = np.full((len(judged), most), -math.inf, np.float32)
        for row, each in enumerate(judged):
            for column, name in enumerate((*each.chunks, "")):
                count = len(windows[name])
                slots[row, column, :count] = range(first[name], first[name] + count)
                reader[row, column] = each.logprobs[column]
        self._table = torch.from_numpy(np.concatenate(list(windows.values()))).to(device)
        self._slots = torch.from_numpy(slots).to(device)
        # A question with fewer candidates than others: its empty places have neither relevance nor likelihood.
        self.reader = torch.from_numpy(np.maximum(reader, -1e4)).to(device)

    def relevance(self, rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the similarity of questions ``vectors``, ``[rows, dim]``, to their candidates, ``[rows, candidates]``."""
        slots = self._slots[rows]
        similar = torch.einsum("qd,qcwd->qcw", vectors, self._table[slots.clamp_min(0)])
        return similar.masked_fill(slots < 0, -1e4).amax(-1)


@dataclass(frozen=True)
class Point:
    """How far training is: after which step, the mean loss since the last point, and how dev questions find their chunks."""

    step: int
    loss: float | None
    recall_at_5: float
    mrr: float


def train(
    student: Student,
    judged: Sequence[Judged],
    dev: Sequence[TuningQuestion],
    index: ChunkIndex,
    embedder: Embedder,
    settings: TrainSettings,
    progress: Progress,
) -> list[Point]:
    """Train ``student`` in place; it ends as it was at its best point (at the start, if nothing was better).

    Returns:
        The curve, the first point being the start.
    """
    torch.manual_seed(settings.seed)
    device = torch.device(str(student.model.device))
    candidates = Candidates(judged, index, embedder, device)
    texts = [each.question.text for each in judged]
    optimiser = torch.optim.AdamW(student.parameters(), lr=student.rate, weight_decay=0.01)
    curve = [_point(student, dev, index, 0, None)]
    best, kept, step = 0, _state(student), 0
    for epoch in range(settings.epochs):
        progress(epoch, settings.epochs, "")
        losses = []
        for rows in torch.split(torch.randperm(len(judged)), settings.batch):
            vectors = student.encode([texts[row] for row in rows])
            relevance = candidates.relevance(rows.to(device), vectors) / settings.temperature
            loss = loss_of(settings.loss, relevance, candidates.reader[rows.to(device)])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))
            step += 1
        curve.append(_point(student, dev, index, step, float(np.mean(losses))))
        if curve[-1].mrr > curve[best].mrr:
            best, kept = len(curve) - 1, _state(student)
        elif len(curve) - 1 - best >= settings.patience:
            break
    student.model.load_state_dict(kept)
    student.model.eval()
    progress(settings.epochs, settings.epochs, "")
    return curve


def _point(student: Student, dev: Sequence[TuningQuestion], index: ChunkIndex, step: int, loss: float | None) -> Point:
    found = ranks(index, dev, student.vectors([question.text for question in dev]))
    return Point(step, loss, float(np.mean(recall(found, 5))), float(np.mean(reciprocal(found))))


def _state(student: Student) -> dict[str, Any]:
    return copy.deepcopy(student.model.state_dict())
