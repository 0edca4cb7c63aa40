"""Holds what a tuned query encoder was worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_lab.tuning.judging import Gain
from cacheblend_lab.tuning.training import Point


@dataclass(frozen=True)
class TuneResult:
    """Holds what came of it.

    Attributes:
        saved: Where the tuned encoder is; None if it is not better, and not saved.
        documents: Whether it embeds documents, too: an index needs :meth:`ChunkIndex.rebuild` before it is asked by it.
        why: The verdict in words.
        held_out: Gains on the questions held out, by measure; ``em`` and ``f1`` where answers were made.
        out_of_domain: Gains on Python's own documentation.
        questions: How many were learned from, kept apart to stop by, and held out.
        reader: How good a teacher the model was: see :func:`judge_reader`.
        curve: How training went.
        example: What the reader made of one question's candidates.
        seconds: What each part took.
        settings: All that it depends on, for JSON.
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
        """Return it for JSON; the held-out measures are at the top."""
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
