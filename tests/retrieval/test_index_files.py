"""The index's files: who may read them, and how they get on with the file system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval import database, sqlite
from cacheblend_rag.retrieval.database import FILE_NAME, IndexDatabase
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


def journal(index: IndexDatabase) -> str:
    return str(index.rows("PRAGMA journal_mode")[0][0])


def count_documents(index: IndexDatabase) -> int:
    return int(index.rows("SELECT count(*) FROM documents")[0][0])


def add_document(index: IndexDatabase, path: str) -> None:
    with index.transaction():
        index.replace_document(path, "digest", [], {})


@pytest.fixture
def networked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "is_network", lambda _: True)


def test_an_index_on_a_network_file_system_shares_no_memory_between_processes(directory: Path, networked: None) -> None:
    first, second = IndexDatabase(directory, CONFIG), IndexDatabase(directory, CONFIG)
    assert journal(first) == journal(second) == "delete"
    before = second.generation()
    add_document(first, "one")
    add_document(second, "two")
    assert count_documents(first) == count_documents(second) == 2
    assert second.generation() != before
    assert {path.name for path in directory.iterdir()} <= {FILE_NAME, FILE_NAME + ".lock"}
    for each in (first, second):
        each.close()


def test_an_index_that_has_a_wal_loses_it_on_a_network_file_system_once_nobody_else_has_it_open(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = IndexDatabase(directory, CONFIG)
    assert journal(older) == "wal"
    add_document(older, "one")
    monkeypatch.setattr(database, "is_network", lambda _: True)
    beside = IndexDatabase(directory, None)
    assert journal(beside) == "wal" and count_documents(beside) == 1
    assert "network file system and is still in WAL mode" in caplog.text
    for each in (older, beside):
        each.close()
    alone = IndexDatabase(directory, None)
    assert journal(alone) == "delete" and count_documents(alone) == 1
    alone.close()


def test_an_interrupted_write_is_not_read_without_write_permission(
    directory: Path, networked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = IndexDatabase(directory, CONFIG)
    index.db.execute("PRAGMA cache_size = 1")  # so that what is not committed reaches the file
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


MOUNTS = r"""21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 21 0:40 / /mnt/with\040space rw shared:1 - nfs4 server:/export rw,vers=4.2
41 21 0:41 / /mnt/hidden rw - nfs server:/other rw
42 21 0:42 / /mnt/hidden rw - tmpfs tmpfs rw
43 40 0:43 / /mnt/with\040space/local rw - xfs /dev/sdb1 rw
44 21 0:44 / /mnt/bucket rw - fuse.s3fs s3fs rw
45 21 0:45 / /mnt/share rw master:2 - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "network"),
    [
        ("/srv/store", False),
        ("/mnt/with space/store", True),
        ("/mnt/with space/local/store", False),
        ("/mnt/with spaces", False),
        ("/mnt/hidden/store", False),
        ("/mnt/bucket", True),
        ("/mnt/share/a/b", True),
    ],
)
def test_a_network_file_system_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, network: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(sqlite, "_MOUNTS", mounts)
    assert sqlite.is_network(Path(path)) == network
    mounts.unlink()
    assert not sqlite.is_network(Path(path))
