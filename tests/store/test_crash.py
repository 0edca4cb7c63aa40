"""Tests writers that die, at random and at every step, and stores that several processes use at once; ``make faults``
runs more of these tests, for longer."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.store import DiskStore, disk
from cacheblend_rag.store.directory import EntryDirectory
from cacheblend_rag.store.files import Spool
from cacheblend_rag.store.kvfile import EncodedKV, EntryFormat
from tests.store import workers
from tests.store.samples import key_of, kv_of, memory_directory, same

pytestmark = pytest.mark.slow

FULL = os.environ.get("CACHEBLEND_FAULTS") == "full"
KILLS = 200 if FULL else 10
PROCESSES, SECONDS = (8, 60.0) if FULL else (3, 0.0)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def counted_bytes(root: Path) -> int:
    """Return the shared count of bytes, before any correction."""
    return EntryDirectory(root / "kv").used()


def real_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("kv/*/*"))


def kill_within(seconds: float, process: Any, connection: Any, chance: random.Random) -> list[int]:
    """Kill a process at some moment after its first entry; return the entries that it has reported."""
    acknowledged = [connection.recv()]
    process.join(timeout=chance.uniform(0, seconds))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    while connection.poll():
        try:
            acknowledged.append(connection.recv())
        except EOFError:
            break
    return acknowledged


@pytest.mark.parametrize("budget", [None, 400_000])
def test_killed_writers_lose_no_stored_entry(root: Path, budget: int | None) -> None:
    chance = random.Random(7)
    number = 0
    for _ in range(KILLS):
        process, connection = workers.start(workers.put_until_killed, root, number, budget)
        acknowledged = kill_within(0.03, process, connection, chance)
        number = acknowledged[-1] + 2

        assert counted_bytes(root) >= real_bytes(root)
        store = DiskStore(root, budget)
        assert counted_bytes(root) == real_bytes(root) == store.stats().nbytes
        assert not [path for path in (root / "tmp").rglob("*") if path.is_file()]
        if budget is None:
            for known in acknowledged:
                found = store.get(key_of(known))
                assert found is not None
                assert same(found, kv_of(known, layers=4, tokens=300))
        else:
            assert store.contains(key_of(acknowledged[-1]))
            assert store.stats().nbytes <= budget
        unfinished = store.get(key_of(acknowledged[-1] + 1))
        assert unfinished is None or same(unfinished, kv_of(acknowledged[-1] + 1, layers=4, tokens=300))
        store.close()
    assert DiskStore(root).verify().damaged == ()


def test_killed_users_of_tiers_lose_no_stored_entry(root: Path) -> None:
    chance = random.Random(11)
    acknowledged: list[int] = []
    number = 0
    for kill in range(KILLS):
        process, connection = workers.start(workers.use_tiers_until_killed, root, number, 60_000, kill)
        acknowledged += kill_within(0.2, process, connection, chance)
        number = acknowledged[-1] + 2

        with closing(workers.tiers_at(root, 60_000)) as store:
            for tier in store.tiers:
                assert tier.verify(repair=False).damaged == ()
            assert store.tiers[0].stats().nbytes <= 60_000
            assert all(store.tiers[1].contains(key_of(known)) for known in acknowledged)
            for known in chance.sample(acknowledged, min(10, len(acknowledged))):
                found = store.get(key_of(known))
                assert found is not None
                assert same(found, kv_of(known, layers=4, tokens=300))
        assert not [path for path in root.glob("*/tmp/**/*") if path.is_file()]


def test_a_writer_killed_at_any_step_leaves_the_store_whole(root: Path) -> None:
    measured = DiskStore(root)
    for number in range(3):
        measured.put(key_of(number), kv_of(number))
    budget = real_bytes(root)
    measured.close()
    step = number = 3
    while True:
        step += 1
        number += 1
        process, connection = workers.start(workers.die_at_step, root, number, budget, step)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert counted_bytes(root) >= real_bytes(root)
        assert real_bytes(root) <= budget
        before = {path.stem for path in root.glob("kv/*/*.safetensors")}
        store = DiskStore(root, budget)
        assert {entry.key for entry in store.entries()} == before
        assert len(before) >= 2
        assert store.verify(repair=False).damaged == ()
        assert not [path for path in (root / "tmp").rglob("*") if path.is_file()]
        assert store.put(key_of(number), kv_of(number))
        store.close()
    assert connection.recv() < step
    assert step > 20


def test_temporary_files_of_living_writers_are_left_alone(root: Path) -> None:
    writer = DiskStore(root)
    with writer._temporary() as temporary:
        temporary.touch()
        DiskStore(root).close()
        assert temporary.exists()
    (root / "tmp" / "notes.txt").touch()
    (root / "tmp" / "0123456789abcdef").mkdir()
    (root / "tmp" / "0123456789abcdef" / "left").touch()
    (root / "tmp" / "0123456789abcdef.lock").touch()
    DiskStore(root).close()
    assert not (root / "tmp" / "0123456789abcdef").exists()
    assert (root / "tmp" / "notes.txt").exists()
    writer.put(key_of(1), kv_of(1))
    writer.close()
    assert [path.name for path in (root / "tmp").iterdir()] == ["notes.txt"]


def test_an_entry_is_synced_before_it_is_visible_and_its_directory_after(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, write, publish = disk.sync, EntryFormat.write, EntryDirectory.publish

    def spy(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any) -> object:
            happened.append(f"{name} {args[0].parent.name}" if name == "sync" else name)
            return function(*args)

        return called

    monkeypatch.setattr(disk, "sync", spy("sync", sync))
    monkeypatch.setattr(EntryFormat, "write", spy("write", write))
    monkeypatch.setattr(EntryDirectory, "publish", spy("publish", publish))
    store = DiskStore(root)
    store.put(key_of(1), kv_of(1))
    token = happened[1].removeprefix("sync ")
    assert happened == ["write", f"sync {token}", "publish", "sync kv", f"sync {root.name}"]
    assert (root / "tmp" / token).is_dir()


def test_two_writers_of_the_same_key_leave_one_entry(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower, faster = DiskStore(root), DiskStore(root)
    write = EntryFormat.write

    def overtaken(self: EntryFormat, encoded: EncodedKV, path: Path) -> None:
        write(self, encoded, path)
        monkeypatch.setattr(EntryFormat, "write", write)
        assert faster.put(key_of(1), kv_of(1))

    monkeypatch.setattr(EntryFormat, "write", overtaken)
    assert slower.put(key_of(1), kv_of(1))
    assert (slower.stats().puts, faster.stats().puts) == (0, 1)
    assert counted_bytes(root) == real_bytes(root)
    assert not list((root / "tmp").glob("*/*"))


def test_several_processes_write_read_and_evict_at_once(root: Path) -> None:
    measured = DiskStore(root)
    measured.put(key_of(1), kv_of(1))
    budget = 5 * real_bytes(root)
    measured.close()
    running = [workers.start(workers.mingle, root, seed, budget, 400, SECONDS) for seed in range(PROCESSES)]
    read = [connection.recv() for _, connection in running]
    for process, _ in running:
        process.join()
        assert process.exitcode == 0
    assert min(read) > 0
    assert counted_bytes(root) == real_bytes(root) <= budget
    assert DiskStore(root).verify().damaged == ()
    assert list((root / "tmp").iterdir()) == []


def test_a_forked_child_writes_under_its_own_lock(root: Path) -> None:
    store = DiskStore(root)
    store.put(key_of(1), kv_of(1))
    child = os.fork()
    if not child:
        try:
            stored = store.put(key_of(2), kv_of(2))
            store.close()
            os._exit(0 if stored else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    DiskStore(root).close()
    assert len([path for path in (root / "tmp").iterdir() if path.is_dir()]) == 1
    assert store.put(key_of(3), kv_of(3))
    assert store.stats().entries == 3


def test_an_unused_spool_leaves_no_trace(root: Path) -> None:
    spool = Spool(root / "tmp")
    spool.sweep()
    spool.close()
    assert list(root.iterdir()) == []
