"""Tells a user who asks the bundled model about documents that it was not made for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from cacheblend_rag.console.groups import ModelOptions

MODELS_TO_TRY = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-360M-Instruct")
"""Small models that answer from any documents, and run on a CPU."""


def left_to_bundled(chosen: ModelOptions) -> bool:
    """Say whether a command was given neither a model nor a server, so that the bundled model answers."""
    return chosen.model is None and getattr(chosen, "server", None) is None


def warn_of_bundled_model(knows: str = "the documents of `cacheblend demo`") -> None:
    """Say on stderr that the bundled model will not do, and which would."""
    typer.echo(
        f"Warning: without --model it is the bundled model, which knows only {knows}: it writes nonsense about any others. "
        f"For your own use a real model, such as --model {MODELS_TO_TRY[0]}, "
        f"{' or '.join(MODELS_TO_TRY[1:])}.",
        err=True,
    )


def warn_if_indexed_for_bundled_model(directory: Path) -> None:
    """Say it if documents other than the bundled ones are indexed in ``directory`` for the bundled model."""
    from cacheblend_rag.engines.models import BUNDLED_MODEL
    from cacheblend_rag.retrieval.index import ChunkIndex

    if not ChunkIndex.exists(directory):
        return
    with ChunkIndex.open(directory) as index:
        # Another model's index is refused with a message of its own.
        if index.config.model.name == BUNDLED_MODEL and not _bundled(each.digest for each in index.documents()):
            warn_of_bundled_model()


def warn_if_not_bundled(files: Iterable[Path]) -> None:
    """Say it if there are other documents than the bundled ones among these files."""
    from cacheblend_rag.retrieval.documents import file_digest

    if not _bundled(map(file_digest, files)):
        warn_of_bundled_model()


def _bundled(digests: Iterable[str | None]) -> bool:
    """Say whether all of these are digests of bundled documents; wherever the package lay when they were indexed."""
    from cacheblend_rag.demo.bundle import bundled_corpus
    from cacheblend_rag.retrieval.documents import file_digest

    known = {file_digest(file) for file in bundled_corpus().iterdir()}
    return all(digest in known for digest in digests)
