"""The index's files: who may read them, and how they get on with the file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.registered import RegisteredChunks
from tests.retrieval.index_workers import CONFIG
from tests.store.samples import memory_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "store"


@pytest.mark.parametrize("given", [None, 0o700, 0o770, 0o755])
def test_the_index_is_as_private_as_its_directory(directory: Path, given: int | None) -> None:
    if given is not None:
        directory.mkdir()
        directory.chmod(given)
    index, registered = IndexDatabase(directory, CONFIG), RegisteredChunks(directory, "model")
    try:
        given = given or 0o700
        assert directory.stat().st_mode & 0o777 == given
        found = {path.name: oct(path.stat().st_mode & 0o777) for path in directory.iterdir()}
        assert {"index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "registered.sqlite"} <= found.keys()
        assert set(found.values()) == {oct(given & 0o666)}
    finally:
        index.close()
        registered.close()
