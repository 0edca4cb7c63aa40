"""Loads the bundled corpus and its questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class DemoQuestion:
    """Holds a question about the bundled corpus.

    Attributes:
        question: The question.
        answer: The corpus's answer.
        kind: ``single``: one chunk holds all facts needed. ``cross``: a chunk refers to something that another chunk
            names. ``two_hop`` and ``two_hop_cross``: two facts, the latter with a reference across chunks.
        source: File that holds the answer.
    """

    question: str
    answer: str
    kind: str
    source: str


def bundled_corpus() -> Path:
    """Return the directory of the bundled documents.

    Example:
        List the bundled documents::

            for file in sorted(bundled_corpus().iterdir()):
                print(file.name)
    """
    return Path(str(files("cacheblend_rag") / "demo" / "corpus"))


def bundled_questions() -> list[DemoQuestion]:
    """Return the questions that come with the corpus.

    Example:
        Print the first question and its answer::

            first = bundled_questions()[0]
            print(first.question, first.answer)
    """
    data = json.loads((files("cacheblend_rag") / "demo" / "questions.json").read_text(encoding="utf-8"))
    return [DemoQuestion(row["question"], row["answer"], row["kind"], row["source"]) for row in data]


def demo_store_name(device: str | None) -> str:
    """Return the name of the demo's store, with the model's digest: package versions may bundle other models."""
    import torch

    from cacheblend_rag.engines.models import bundled_model_directory
    from cacheblend_rag.store.kv import ModelFingerprint

    digest = ModelFingerprint.from_directory(bundled_model_directory(), torch.float32).digest
    return "-".join(["demo", digest[:8], *([device.replace(":", "-")] if device else [])])
