"""Holds the result of tuning a query encoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_lab.tuning.judging import Gain
from cacheblend_lab.tuning.training import Point


@dataclass(frozen=True)
class TuneResult:
    """Holds the result of one tuning run.

    Attributes:
        saved: Directory of the tuned encoder; None if the encoder was not saved.
        documents: Whether the encoder embeds documents, too; the index then needs :meth:`ChunkIndex.rebuild` before
            use.
        why: Reason for saving or not saving, as text.
        held_out: Gains on the held-out questions, by measure; includes ``em`` and ``f1`` if questions were answered.
        out_of_domain: Gains on Python's own documentation.
        questions: Numbers of questions in ``train``, ``dev`` and ``held_out``.
        reader: Quality of the reader as a teacher: see :func:`judge_reader`.
        curve: Points of the training curve.
        example: The reader's judgement of one question's candidates; see :func:`example` in ``card.py``.
        seconds: Duration of each step.
        settings: All settings of the run, for JSON.
    """

    saved: Path | None
    documents: bool
    why: str
    held_out: dict[str, Gain]
    out_of_domain: dict[str, Gain]
    questions: dict[str, int]
    reader: dict[str, float]
    curve: list[Point]
    example: dict[str, Any]
    seconds: dict[str, float]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON; the held-out measures are top-level keys."""
        return {
            **{name: asdict(found) for name, found in self.held_out.items()},
            "out_of_domain": {name: asdict(found) for name, found in self.out_of_domain.items()},
            "saved": None if self.saved is None else str(self.saved),
            "documents": self.documents,
            "why": self.why,
            "questions": self.questions,
            "reader": self.reader,
            "curve": [asdict(point) for point in self.curve],
            "example": self.example,
            "seconds": self.seconds,
            "settings": self.settings,
        }
