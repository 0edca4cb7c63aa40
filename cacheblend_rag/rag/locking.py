"""One run at a time indexes into a directory: two would compute everything twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval.database import FILE_NAME
from cacheblend_rag.retrieval.index import ChunkIndex

LOCK_NAME = "indexing.lock"
# What stands in the directory of a store that nothing was put into, beside the index.
_OURS = frozenset({LOCK_NAME, "kv", "tmp"})


@contextmanager
def indexing_alone(directory: Path) -> Iterator[None]:
    """Keep every other run, of this process or another, from indexing into ``directory`` meanwhile.

    Raises:
        StoreError: Another run is at it, or the directory cannot be written.
    """
    lock = FileLock(directory / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(
            f"Another run is indexing into {directory} now. Wait until it has ended, then run this again: what it has "
            "indexed costs nothing then."
        ) from None
    except OSError as error:
        raise StoreError(
            f"Cannot write in {directory}: {error.strerror or error}. Use another store directory."
        ) from error
    try:
        yield
    finally:
        lock.release()


def refuse_if_indexing(directory: Path) -> None:
    """Refuse at once what :func:`indexing_alone` would refuse later, when a model has been loaded for it.

    Raises:
        StoreError: Another run is indexing into ``directory``.
    """
    if (directory / LOCK_NAME).exists():
        with indexing_alone(directory):
            pass


@contextmanager
def removed_if_left_empty(directory: Path) -> Iterator[None]:
    """Take back a store that the block has made and put nothing into: one that failed, or found nothing to index."""
    made = not directory.exists()
    if not made and (not directory.is_dir() or any(directory.iterdir())):
        yield  # not ours
        return
    try:
        yield
    finally:
        if directory.is_dir() and _is_empty(directory):
            shutil.rmtree(directory)
            if not made:
                directory.mkdir()


def _is_empty(directory: Path) -> bool:
    """Say whether a store directory holds no document and no KV."""
    if ChunkIndex.exists(directory):
        with ChunkIndex.open(directory) as index:
            if index.documents():
                return False
    return next(directory.glob("kv/*/*"), None) is None and not any(
        file.name not in _OURS and not file.name.startswith(FILE_NAME) for file in directory.iterdir()
    )
