"""Lets only one run at a time index into a directory, because two runs would compute everything twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval.documents import INDEX_FILE, LOCK_FILE
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.files import file_mode, make_root
from cacheblend_rag.store.opening import RECORD

# Files and directories of a store without content, beside the index.
_OURS = frozenset({LOCK_FILE, RECORD, "kv", "tmp"})


@contextmanager
def indexing_alone(directory: Path) -> Iterator[None]:
    """Keep other threads and processes from indexing into ``directory``; the thread with the lock may enter again.

    Raises:
        StoreError: Another run is indexing into the directory, or the directory cannot be written.
    """
    # The lock is a singleton: the command holds the lock while the model loads, and the pipeline takes the lock again.
    try:
        lock = FileLock(directory / LOCK_FILE, mode=file_mode(directory), is_singleton=True)
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


@contextmanager
def indexing_into(directory: Path) -> Iterator[None]:
    """Create ``directory`` if missing, lock it for indexing, and remove a new store again if it stays empty.

    The function serves a command: the command learns that another run is indexing before it loads a model, and a run
    that fails, or finds nothing to index, leaves no empty store behind.

    Raises:
        StoreError: Another run is indexing into the directory, or the directory cannot be created or written.
    """
    made = not directory.exists()
    try:
        make_root(directory)
        empty = not any(directory.iterdir())
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be used as a store: {error.strerror or error}. Use another store directory."
        ) from error
    with indexing_alone(directory):
        try:
            yield
        finally:
            # An error here must not hide an earlier error; an empty store does no harm.
            with suppress(StoreError, OSError):
                if empty and _is_empty(directory):
                    for each in directory.iterdir():
                        shutil.rmtree(each) if each.is_dir() else each.unlink()
                    if made:
                        directory.rmdir()


def _is_empty(directory: Path) -> bool:
    """Return whether a store directory holds no document and no KV."""
    if ChunkIndex.exists(directory):
        with ChunkIndex(directory) as index:
            if index.documents():
                return False
    return next(directory.glob("kv/*/*"), None) is None and not any(
        file.name not in _OURS and not file.name.startswith(INDEX_FILE) for file in directory.iterdir()
    )
