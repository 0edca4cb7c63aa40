"""Holds the result of tuning a query encoder, writes its model card, and chooses an example question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_lab.marginal import posterior
from cacheblend_lab.tuning.candidates import StoredCandidates
from cacheblend_lab.tuning.judging import Gain
from cacheblend_lab.tuning.teacher import Judged
from cacheblend_lab.tuning.training import Point
from cacheblend_rag.retrieval.index import ChunkIndex


@dataclass(frozen=True)
class TuneResult:
    """Holds the result of one tuning run.

    Attributes:
        saved: Directory of the tuned encoder; None if the encoder was not saved.
        documents: Whether the encoder embeds documents, too; the index then needs :meth:`ChunkIndex.rebuild` before
            use.
        held_out: Gains on the held-out questions, by measure; includes ``em`` and ``f1`` if questions were answered.
        reader: Quality of the reader as a teacher: see :func:`judge_reader`.
        example: The reader's judgement of one question's candidates; see :func:`example` in ``card.py``.
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


LABELS = {
    "recall_at_1": "recall@1",
    "recall_at_5": "recall@5",
    "recall_at_20": "recall@20",
    "mrr": "MRR@20",
    "em": "answers, exact match",
    "f1": "answers, F1",
}
"""Display names of the measures."""

_CARD = """---
library_name: sentence-transformers
base_model: {embedding}
tags: [sentence-transformers, retrieval, cacheblend]
---
# {title}

{what} Tuned with
`cacheblend tune-retriever` {version} (REALM, arXiv 2002.08909): {loss} loss, {part}, seed {seed}; the reader was {reader}, over
{chunks:,} chunks; {train} questions learned from, {dev} to stop by, {held_out} held out.

{table}

The interval is that of the difference, with 95% confidence, over the questions held out. Out of domain is Python's own
documentation, found by the first line of each docstring.

    from sentence_transformers import SentenceTransformer
    SentenceTransformer("THIS DIRECTORY").encode_query("...")

    {use}
"""
_QUESTIONS_ONLY = (
    "A query encoder tuned by its reader",
    "It embeds **questions** for an index whose chunks were embedded by `{embedding}`; embed documents with that one.",
    'cacheblend ask "..." --store DIR --retriever "THIS DIRECTORY"',
)
_BOTH = (
    "An embedding model tuned by its reader",
    "It embeds questions **and documents**; it began as `{embedding}`, and an index of that one must be embedded again.",
    'cacheblend store reembed --store DIR --embedding "THIS DIRECTORY"',
)


def rows_of(result: TuneResult) -> list[list[str]]:
    """Return the rows of the table of before and after; the first row is the heading."""
    rows = [["", "before", "after", "gain, 95% interval"]]
    for where, found in (("", result.held_out), ("out of domain, ", result.out_of_domain)):
        for name, each in found.items():
            gained = f"{each.difference * 100:+.1f} [{each.low * 100:+.1f}, {each.high * 100:+.1f}]"
            rows.append([f"{where}{LABELS[name]}", f"{each.before:.1%}", f"{each.after:.1%}", gained])
    return rows


def write_card(directory: Path, result: TuneResult) -> None:
    """Write the model card: data, seed, before and after."""
    rows = rows_of(result)
    table = "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
    training = result.settings["training"]
    title, what, use = _BOTH if result.documents else _QUESTIONS_ONLY
    text = _CARD.format(
        title=title,
        what=what.format(embedding=result.settings["embedding"]),
        use=use,
        **{name: result.settings[name] for name in ("embedding", "version", "reader", "chunks")},
        **{name: training[name] for name in ("loss", "part", "seed")},
        **result.questions,
        table=table,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


@torch.no_grad()
def example(judged: Sequence[Judged], index: ChunkIndex, tuned: ChunkIndex, temperature: float) -> dict[str, Any]:
    """Return the question whose posterior differs most from its prior: where reader and retriever disagree most.

    Each candidate has its text, p(z|x) before (``prior``), p(z|x, y) by the reader (``posterior``), and p(z|x)
    ``after``. ``index`` and ``tuned`` hold equal chunks, with the embedding before and after tuning.
    """
    texts = [each.question.text for each in judged]
    rows = torch.arange(len(judged))
    relevances = []
    for each in (index, tuned):
        embedder = each.load_embedder()
        candidates = StoredCandidates(judged, each, embedder, torch.device("cpu"))
        relevance, reader = candidates.of(rows, torch.from_numpy(embedder.questions(texts)))
        relevances.append(relevance / temperature)
    before, after = relevances
    believed, useful, learned = before.softmax(-1), posterior(before, reader), after.softmax(-1)
    at = int((useful - believed).abs().sum(-1).argmax())
    shown = judged[at]
    return {
        "question": shown.question.text,
        "answers": list(shown.question.answers),
        "candidates": [
            {
                "text": index.chunk(name).text if name else "",
                "prior": float(believed[at, i]),
                "posterior": float(useful[at, i]),
                "after": float(learned[at, i]),
            }
            for i, name in enumerate((*shown.chunks, ""))
        ],
    }
