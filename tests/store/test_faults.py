"""A full disk, missing permissions and foreign files lead to a clear message, and readable entries stay readable."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cacheblend_rag.errors import DamagedKVError, InputError, StoreError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore, open_store
from cacheblend_rag.store.directory import EntryDirectory
from cacheblend_rag.store.kv import KVKey
from cacheblend_rag.store.kvfile import EntryFormat
from tests.store import workers
from tests.store.samples import key_of, kv_of, memory_directory, same

ROOT = os.geteuid() == 0


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB, if this user may."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if not ROOT or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def holds(store: DiskStore, *numbers: int) -> bool:
    found = [store.get(key_of(number)) for number in numbers]
    return all(kv is not None and same(kv, kv_of(n, tokens=200)) for kv, n in zip(found, numbers, strict=True))


def test_a_full_disk_refuses_new_entries_and_keeps_stored_ones(small_disk: Path) -> None:
    store = DiskStore(small_disk)
    stored = []
    with pytest.raises(StoreError, match=r"disk is full; free some space.*evict"):
        for number in range(100):
            store.put(key_of(number), kv_of(number, tokens=200))
            stored.append(number)
    assert len(stored) > 10
    assert holds(store, *stored)
    assert store.verify().damaged == ()
    assert DiskStore(small_disk).stats().entries == len(stored)

    assert store.evict(store.stats().nbytes // 2) > 0
    assert store.put(key_of(99), kv_of(99, tokens=200))
    assert holds(store, 99, stored[-1])


def test_a_disk_filled_by_other_files_still_evicts_and_opens(small_disk: Path) -> None:
    store = DiskStore(small_disk)
    store.put(key_of(1), kv_of(1, tokens=200))
    with pytest.raises(OSError, match="No space"), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(4096))
    (small_disk / "kv" / "usage").unlink()
    again = DiskStore(small_disk)
    assert holds(again, 1)
    with pytest.raises(StoreError, match="disk is full"):
        again.put(key_of(2), kv_of(2, tokens=200))
    assert again.delete(key_of(1))
    assert again.stats().entries == 0


@pytest.mark.slow
def test_a_file_size_limit_refuses_new_entries_and_keeps_stored_ones(root: Path) -> None:
    message = workers.call(workers.under_file_size_limit, root, 100_000)
    assert "largest file allowed" in message
    assert "ulimit -f" in message
    assert not [path for path in (root / "tmp").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_an_entry_is_missed_but_not_lost_without_file_descriptors(root: Path) -> None:
    DiskStore(root).put(key_of(1), kv_of(1))
    assert workers.call(workers.without_file_descriptors, root) == 0


def test_a_log_record_does_not_keep_a_damaged_entrys_file_open(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(root)
    for number, damage in enumerate((b"layer.00000.k", b"KV", bytes(8)), 1):
        store.put(key_of(number), kv_of(number))
        (path,) = root.glob(f"kv/*/{key_of(number)}.safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[: -len(damage)] + damage if number == 2 else damage + whole[len(damage) :])
        found = store.get(key_of(number))
        with suppress(DamagedKVError):
            assert found is None or not same(found, kv_of(number))
        del found
    assert len(caplog.records) == 3
    links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [link for link in links if link.startswith(str(root / "kv")) and ".safetensors" in link]


@pytest.mark.slow
def test_a_read_only_store_reads_and_refuses_to_write(root: Path) -> None:
    path = root / "store"
    store = DiskStore(path)
    store.put(key_of(1), kv_of(1))
    store.put(key_of(2), kv_of(2))
    store.close()
    (damaged,) = path.glob(f"kv/*/{key_of(2)}.safetensors")
    data = bytearray(damaged.read_bytes())
    data[-kv_of(2).nbytes] ^= 1
    damaged.write_bytes(data)
    everything = [path, *path.rglob("*")]
    for each in everything:
        each.chmod(0o555 if each.is_dir() else 0o444)
    try:
        messages = workers.call(workers.without_permission, path, workers.NOBODY if ROOT else None)
    finally:
        for each in everything:
            each.chmod(0o755 if each.is_dir() else 0o644)
    assert set(messages) == {"put", "delete", "evict"}
    for message in messages.values():
        assert str(path) in message
        assert "no permission; give this user the permission" in message
    assert {entry.key for entry in DiskStore(path).entries()} == {key_of(1), key_of(2)}


@pytest.mark.slow
def test_an_unreadable_store_is_an_error_and_not_an_empty_store(root: Path) -> None:
    DiskStore(root / "store").put(key_of(1), kv_of(1))
    (root / "store" / "kv").chmod(0)
    try:
        message = workers.call(workers.without_read_permission, root / "store", workers.NOBODY if ROOT else None)
    finally:
        (root / "store" / "kv").chmod(0o755)
    assert f"cannot open the KV store {root / 'store'}: no permission" in message


def test_a_file_in_the_place_of_the_store_directory_is_an_error(root: Path) -> None:
    (root / "file").touch()
    (root / "store").mkdir()
    (root / "store" / "kv").touch()
    for path in (root / "file", root / "file" / "below", root / "store"):
        with pytest.raises(StoreError, match=f"cannot open the KV store {path}: not a directory"):
            open_store(path)


def test_a_removed_store_directory_is_created_again(root: Path) -> None:
    store = DiskStore(root / "store", budget=10**6)
    store.put(key_of(1), kv_of(1))
    shutil.rmtree(root / "store")
    assert store.get(key_of(1)) is None
    assert store.put(key_of(1), kv_of(1))
    assert store.stats().entries == 1


def test_foreign_files_in_the_store_are_left_alone(root: Path) -> None:
    store = DiskStore(root)
    store.put(key_of(1), kv_of(1))
    (root / "kv" / "README").touch()
    (root / "kv" / "ab").mkdir(exist_ok=True)
    (root / "kv" / "ab" / "notes.safetensors").touch()
    assert DiskStore(root).stats().entries == 1
    store.evict(0)
    assert (root / "kv" / "ab" / "notes.safetensors").exists()


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 16, b"12345678", bytes(15)])
def test_a_broken_byte_count_is_counted_again(root: Path, garbage: bytes) -> None:
    store = DiskStore(root, budget=10**6)
    store.put(key_of(1), kv_of(1))
    (root / "kv" / "usage").write_bytes(garbage)
    store.put(key_of(2), kv_of(2))
    assert store._directory.used() == store.stats().nbytes


def test_a_clock_set_back_does_not_change_the_order_of_eviction(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = DiskStore(root)
    for number in range(3):
        measured.put(key_of(number), kv_of(number))
    budget = measured.stats().nbytes
    measured.close()
    real = time.time_ns
    monkeypatch.setattr("cacheblend_rag.store.directory.time.time_ns", lambda: real() - 86_400 * 10**9)
    for number in range(3, 6):
        store = DiskStore(root, budget)  # a new process knows only the stamps on the disk
        assert store.put(key_of(number), kv_of(number))
        store.close()
    assert {entry.key for entry in store.entries()} == {key_of(number) for number in range(3, 6)}


def test_replacing_an_entry_by_a_larger_one_stays_within_the_budget(root: Path) -> None:
    measured = DiskStore(root / "measured")
    for number in range(3):
        measured.put(key_of(number), kv_of(number, tokens=40))
    budget = measured.stats().nbytes
    store = DiskStore(root / "store", budget)
    for number in range(3):
        store.put(key_of(number), kv_of(number, tokens=40))
    assert store.put(key_of(0), kv_of(0, tokens=60), replace=True)  # the least recently used entry
    assert store.stats().nbytes <= budget
    assert same(store.get(key_of(0)), kv_of(0, tokens=60))
    assert not store.contains(key_of(1)) and store.contains(key_of(2))


def damaged_for_good(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a damaged entry that cannot be removed; return its file."""
    store.put(key_of(1), kv_of(1))
    (path,) = store.root.glob(f"kv/*/{key_of(1)}.safetensors")
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)

    def refused(directory: EntryDirectory, key: KVKey) -> int | None:
        raise PermissionError(errno.EACCES, "no", str(directory.file(key)))

    with monkeypatch.context() as patch:
        patch.setattr(EntryDirectory, "remove", refused)
        found = store.get(key_of(1))
        with pytest.raises(DamagedKVError):
            assert found is not None and same(found, kv_of(1))
    assert path.exists()
    return path


def test_a_damaged_entry_that_cannot_be_removed_is_a_miss_and_the_next_put_replaces_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(root)
    damaged_for_good(store, monkeypatch)
    assert store.get(key_of(1)) is None and not store.contains(key_of(1))
    assert store.put(key_of(1), kv_of(1))
    assert store.contains(key_of(1)) and same(store.get(key_of(1)), kv_of(1))


def test_a_whole_entry_with_the_inode_of_a_damaged_one_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    path = damaged_for_good(store, monkeypatch)
    inode = root / "inode"
    inode.hardlink_to(path)
    assert store.put(key_of(1), kv_of(1))
    inode.write_bytes(path.read_bytes())
    inode.replace(path)
    assert store.contains(key_of(1)) and same(store.get(key_of(1)), kv_of(1))


def test_an_unknown_codec_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match="unknown KV codec 'zip': use none or int8"):
        DiskStore(root, format=EntryFormat("zip"))


def test_a_tier_that_refuses_an_entry_does_not_keep_other_tiers_from_storing_it(small_disk: Path) -> None:
    ram = MemoryStore()
    store = TieredStore([ram, DiskStore(small_disk)])
    with pytest.raises(StoreError, match="disk is full"):
        store.put(key_of(1), kv_of(1, tokens=100_000))
    assert ram.contains(key_of(1))
