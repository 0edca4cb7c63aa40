"""Writes a tuned query encoder as an ordinary sentence-transformers model with a card, completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.retrieval.embedding import RETRIEVER_FILE


def check_free(output: Path) -> None:
    """Raise an error for an output that exists, so that an earlier encoder is never overwritten.

    Raises:
        InputError: ``output`` is a file or a directory that is not empty.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} is there already and stays as it is; name a new directory for the tuned retriever.")


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``output``, which is removed at the end unless it has been moved.

    Raises:
        StoreError: The directory cannot be made.
    """
    beside = output.with_name(f".{output.name}.unfinished")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"{beside} cannot be made ({error}); name a directory that can be written to.") from error
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_model(model: Any, directory: Path, about: dict[str, Any]) -> None:
    """Write the model and its report; see :func:`write_report`."""
    model.save_pretrained(str(directory), create_model_card=False)
    write_report(directory, about)


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write the report beside the model; the report must name the embedding model that was tuned."""
    (directory / RETRIEVER_FILE).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def put_in_place(directory: Path, output: Path) -> None:
    """Rename the finished directory to ``output`` in one step.

    Raises:
        StoreError: The directory cannot be renamed.
    """
    try:
        directory.replace(output)
    except OSError as error:
        raise StoreError(f"{output} cannot be written ({error}).") from error
