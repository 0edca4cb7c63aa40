"""Makes outcomes of prompts in which no field has its default value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cacheblend_rag.blending.outcome import ChunkLoad, ChunkOutcome, Lack, PromptOutcome, Usage
from cacheblend_rag.store.events import TierReads


def filled() -> PromptOutcome:
    """Return the outcome of a blend; a field of a new type needs a value only in this function."""
    load = ChunkLoad("disk", 10, 0.5)
    known = {
        "Mode": "blend",
        "Usage": Usage(*range(1, len(fields(Usage)) + 1)),
        "tuple[ChunkOutcome, ...]": (ChunkOutcome("a", 1, 2, "missing", 2, ("kv", "own_kv"), load),),
        "ChunkLoad": ChunkLoad("ram", 3, 0.0),
        "Mapping[str, TierReads]": {"disk": TierReads(10, 2, 0.5)},
    }

    def value(number: int, kind: str) -> Any:
        new = {
            "str": f"text {number}",
            "float": number / 8,
            "int": number,
            "bool": True,
        }
        return {**new, **known}[kind.removesuffix(" | None")]

    return PromptOutcome(**{each.name: value(n, str(each.type)) for n, each in enumerate(fields(PromptOutcome), 1)})


def lacking(*names: str, what: Lack = "kv") -> tuple[ChunkOutcome, ...]:
    """Return chunks of one token that were computed because ``what`` was missing in the store."""
    return tuple(ChunkOutcome(name, at, 1, "missing", 1, (what,)) for at, name in enumerate(names))


def missing_in(report: dict[str, Any]) -> list[str]:
    """Return the ids of chunks whose KV was not stored, in an outcome of JSON values."""
    return [chunk["id"] for chunk in report["chunks"] if "kv" in chunk["lacks"]]


def loads_in(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the loads of stored KV in an outcome of JSON values."""
    return [load for load in (report["header"], *(chunk["load"] for chunk in report["chunks"])) if load is not None]


def in_place(*names: str) -> tuple[ChunkOutcome, ...]:
    """Return chunks of one token that were computed, although they are stored."""
    return tuple(ChunkOutcome(name, at, 1, "recomputed", 1) for at, name in enumerate(names))


def differing(some: PromptOutcome, other: PromptOutcome) -> set[str]:
    """Return the names of the fields in which two outcomes differ."""
    return {e.name for e in fields(PromptOutcome) if getattr(some, e.name) != getattr(other, e.name)}
