"""Outcomes of prompts in which no fact has the value that it has where nobody tells it, whatever facts there are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cacheblend_rag.blending.outcome import ChunkLoad, PromptOutcome, Usage
from cacheblend_rag.store.events import TierReads


def filled() -> PromptOutcome:
    """Return one of a blend; a field of a type that is new here needs a value in this function, and nowhere else."""
    known = {
        "Mode": "blend",
        "Usage": Usage(*range(1, len(fields(Usage)) + 1)),
        "tuple[ChunkLoad, ...]": (ChunkLoad("a", "disk", 10, 0.5), ChunkLoad("", "ram", 3, 0.0)),
        "Mapping[str, TierReads]": {"disk": TierReads(10, 2, 0.5)},
    }

    def value(number: int, kind: str) -> Any:
        new = {
            "str": f"text {number}",
            "float": number / 8,
            "int": number,
            "bool": True,
            "tuple[str, ...]": (f"chunk {number}",),
        }
        return known.get(kind) or new[kind.removesuffix(" | None")]

    return PromptOutcome(**{each.name: value(n, str(each.type)) for n, each in enumerate(fields(PromptOutcome), 1)})


def differing(some: PromptOutcome, other: PromptOutcome) -> set[str]:
    """Return the names of the facts that two outcomes tell differently."""
    return {e.name for e in fields(PromptOutcome) if getattr(some, e.name) != getattr(other, e.name)}
