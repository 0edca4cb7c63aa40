"""Tests tiers whose entries are written later, by a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore, moving
from cacheblend_rag.store.kv import ChunkKV, KVKey
from cacheblend_rag.store.moving import WriteQueue
from tests.store.samples import key_of, kv_of, memory_directory, ranked, same


class Slow(MemoryStore):
    """A lasting tier whose puts wait until ``go_on`` is set."""

    lasts = True

    def __init__(self) -> None:
        super().__init__(writes="back")
        self.go_on, self.began = threading.Event(), threading.Event()
        self.order: list[str] = []
        self.fails: StoreError | None = None

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        self.began.set()
        assert self.go_on.wait(60)
        if self.fails is not None:
            raise self.fails
        self.order.append(f"written {key[:1]}")
        return super().put(key, kv, replace)


@pytest.fixture
def slow() -> Iterator[Slow]:
    tier = Slow()
    yield tier
    tier.go_on.set()


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def keys(store: TieredStore | DiskStore | MemoryStore) -> set[KVKey]:
    return {entry.key for entry in store.entries()}


def test_a_put_does_not_wait_for_a_tier_written_behind(slow: Slow) -> None:
    store = TieredStore([MemoryStore(kv_of(0).nbytes), slow])
    for number in (1, 2):
        assert store.put(key_of(number), ranked(kv_of(number)))
    assert keys(slow) == set()
    assert store.contains(key_of(1))
    found = store.get(key_of(1))
    assert found is not None, "RAM has let go of it, and the tier does not have it yet"
    assert same(found, kv_of(1))
    assert found.static_deviation() is not None
    slow.go_on.set()
    store.flush()
    assert keys(slow) == {key_of(1), key_of(2)}
    assert same(slow.get(key_of(1)), kv_of(1))


def test_a_queued_entry_is_not_changed_by_later_changes_of_its_tensors(slow: Slow) -> None:
    kv = kv_of(1)
    store = TieredStore([slow])
    store.put(key_of(1), kv)
    for tensor in kv.layer(0):
        tensor.zero_()
    slow.go_on.set()
    store.flush()
    assert same(slow.get(key_of(1)), kv_of(1))


@pytest.mark.parametrize("replace", [False, True])
def test_a_put_of_a_waiting_entry_replaces_it_only_with_replace(slow: Slow, replace: bool) -> None:
    store = TieredStore([slow])
    store.put(key_of(1), kv_of(1))
    assert slow.began.wait(60)  # the next entry must wait
    store.put(key_of(2), kv_of(2))
    store.put(key_of(2), kv_of(3), replace)
    wanted = kv_of(3 if replace else 2)
    assert same(store.get(key_of(2)), wanted)
    slow.go_on.set()
    store.flush()
    assert same(slow.get(key_of(2)), wanted)


def test_a_waiting_entry_is_not_copied_again(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = WriteQueue(slow, lambda error: None, most_bytes=kv_of(0).nbytes)
    queue.put(key_of(1), kv_of(1), False)
    assert slow.began.wait(60)
    monkeypatch.setattr(moving, "packed", lambda layers: pytest.fail("the entry is copied again"))
    queue.put(key_of(1), kv_of(1), False)  # this put does not wait for room either
    slow.go_on.set()
    queue.close()
    assert slow.order == [f"written {key_of(1)[:1]}"]


def test_an_entry_replaced_during_its_write_is_written_again(slow: Slow) -> None:
    store = TieredStore([slow])
    store.put(key_of(1), kv_of(1))
    assert slow.began.wait(60)
    store.put(key_of(1), kv_of(2), replace=True)
    slow.go_on.set()
    store.flush()
    assert same(slow.get(key_of(1)), kv_of(2))


def test_closing_a_store_writes_all_waiting_entries(root: Path) -> None:
    disk = DiskStore(root, writes="back")
    with TieredStore([MemoryStore(), disk]) as store:
        for number in range(5):
            store.put(key_of(number), kv_of(number))
    assert keys(DiskStore(root)) == {key_of(number) for number in range(5)}


ENDS = """
import sys, time
from obstore.store import LocalStore
from cacheblend_rag.store import MemoryStore, TieredStore
from cacheblend_rag.store.objects import ObjectStore
from tests.store.samples import key_of, kv_of

class Slow:
    def __init__(self, bucket):
        self.bucket = bucket
    def __getattr__(self, name):
        return getattr(self.bucket, name)
    def put(self, *entry):
        time.sleep(0.1)
        return self.bucket.put(*entry)

store = TieredStore([MemoryStore(), ObjectStore(Slow(LocalStore(sys.argv[1])), writes="back")])
for number in range(5):
    store.put(key_of(number), kv_of(number))
"""


def test_a_program_that_ends_without_closing_still_writes_its_waiting_remote_entries(root: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, root], check=True)
    assert {file.stem for file in root.glob("kv/*/*")} == {key_of(number) for number in range(5)}


def test_a_deleted_entry_is_not_written_afterwards(slow: Slow) -> None:
    store = TieredStore([slow])
    store.put(key_of(1), kv_of(1))
    assert slow.began.wait(60)
    store.put(key_of(2), kv_of(2))
    with ThreadPoolExecutor(1) as pool:
        assert store.delete(key_of(2))
        being_written = pool.submit(store.delete, key_of(1))
        slow.go_on.set()
        assert being_written.result()
    store.flush()
    assert keys(slow) == set()
    assert not store.contains(key_of(1))


def test_waiting_entries_stay_within_the_limit(slow: Slow) -> None:
    queue = WriteQueue(slow, lambda error: None, most_bytes=kv_of(0).nbytes)
    queue.put(key_of(1), kv_of(1), False)

    def second() -> None:
        queue.put(key_of(2), kv_of(2), False)
        slow.order.append("accepted 2")

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second)
        assert slow.began.wait(60)
        slow.go_on.set()
        waits.result()
    queue.close()
    assert slow.order[0].startswith("written")
    assert keys(slow) == {key_of(1), key_of(2)}


def test_refused_entries_are_dropped_and_logged_once(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    slow.fails = StoreError("the disk is full")
    slow.go_on.set()
    store = TieredStore([MemoryStore(), slow])
    for number in (1, 2):
        assert store.put(key_of(number), kv_of(number))
    store.flush()
    assert [record.message for record in caplog.records] == ["Entries go to the other tiers alone: the disk is full"]
    assert store.get(key_of(1)) is not None
    slow.fails = None
    assert store.put(key_of(2), kv_of(2))
    store.flush()
    assert same(slow.get(key_of(2)), kv_of(2))
