"""Writes a tuned query encoder as an ordinary sentence-transformers model with a card, whole or not at all."""

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
    """Refuse a directory that holds something: what is there stays, so that one can go back to it.

    Raises:
        InputError: It is not empty, or no directory.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} is there already and stays as it is; name a new directory for the tuned retriever.")


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Give a directory beside ``output`` to write into; what is still there at the end is removed.

    Raises:
        StoreError: It cannot be made.
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
    """Write the model, and what it is for; see :func:`write_report`."""
    model.save_pretrained(str(directory), create_model_card=False)
    write_report(directory, about)


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Write what was measured beside the model; it must name the embedding model it was tuned from."""
    (directory / RETRIEVER_FILE).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def put_in_place(directory: Path, output: Path) -> None:
    """Make the finished directory appear as ``output``, at once.

    Raises:
        StoreError: It cannot be moved there.
    """
    try:
        directory.replace(output)
    except OSError as error:
        raise StoreError(f"{output} cannot be written ({error}).") from error
