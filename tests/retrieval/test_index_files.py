"""Tests the index's files: their permissions, and their use of the file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval import database
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.documents import INDEX_FILE
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
        assert {"index.sqlite3", "registered.sqlite"} <= found.keys()
        assert set(found.values()) == {oct(given & 0o666)}
    finally:
        index.close()
        registered.close()


def journal(index: IndexDatabase) -> str:
    return str(index.rows("PRAGMA journal_mode")[0][0])


def count_documents(index: IndexDatabase) -> int:
    return int(index.rows("SELECT count(*) FROM documents")[0][0])


def add_document(index: IndexDatabase, path: str) -> None:
    with index.transaction():
        index.replace_document(path, "digest", [], {})


def test_processes_share_an_index_without_shared_memory_files(directory: Path) -> None:
    first, second = IndexDatabase(directory, CONFIG), IndexDatabase(directory, CONFIG)
    assert journal(first) == journal(second) == "delete"
    before = second.generation
    add_document(first, "one")
    add_document(second, "two")
    assert count_documents(first) == count_documents(second) == 2
    assert second.generation != before
    assert {path.name for path in directory.iterdir()} <= {INDEX_FILE, INDEX_FILE + ".lock"}
    for each in (first, second):
        each.close()


def test_a_write_in_progress_does_not_block_readers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexDatabase, "busy_timeout_s", 0.0)
    writer, reader = IndexDatabase(directory, CONFIG), IndexDatabase(directory, None)
    writer.db.execute("PRAGMA cache_size = 1")
    with writer.transaction():
        for number in range(2000):
            writer.replace_document(f"document {number}" * 10, "digest", [], {})
        assert count_documents(reader) == 0
    assert count_documents(reader) == 2000
    for each in (writer, reader):
        each.close()


def test_an_interrupted_write_is_not_read_without_write_permission(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = IndexDatabase(directory, CONFIG)
    index.db.execute("PRAGMA cache_size = 1")
    index.db.execute("PRAGMA cache_spill = 1")  # uncommitted pages reach the file
    copy = directory.with_name("copy")
    with pytest.raises(KeyboardInterrupt), index.transaction():
        for number in range(2000):
            index.replace_document(f"document {number}" * 10, "digest", [], {})
        shutil.copytree(directory, copy)
        raise KeyboardInterrupt
    index.close()
    monkeypatch.setattr(database.os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="not closed properly"):
        IndexDatabase(copy, None)
    monkeypatch.undo()
    healed = IndexDatabase(copy, None)
    assert count_documents(healed) == 0
    healed.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_writing_to_an_index_moved_while_open_is_an_error(directory: Path, replaced: bool) -> None:
    with IndexDatabase(directory, CONFIG) as index:
        if replaced:  # a backup does so
            shutil.copy(index.path, directory / "copy")
            (directory / "copy").rename(index.path)
        else:
            index.path.unlink()
        with pytest.raises(StoreError, match="moved, deleted or replaced while it was open; restart what has it open"):
            add_document(index, "one")


def test_an_index_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"caf\xe9 #?%41")
    try:
        directory.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    with IndexDatabase(directory, CONFIG) as index:
        add_document(index, "one")
    assert IndexDatabase.exists(directory)
    with IndexDatabase(directory, None) as again:
        assert count_documents(again) == 1
