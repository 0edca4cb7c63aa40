"""Tests that files are as private as their directory, and that nothing is read or written through a link or a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import DiskStore
from cacheblend_rag.store.opening import record_tiers
from tests.store.samples import key_of, kv_of, memory_directory, same


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> set[tuple[bool, str]]:
    return {(path.is_dir(), oct(path.stat().st_mode & 0o7777)) for path in root.rglob("*")}


def fill(root: Path) -> DiskStore:
    store = DiskStore(root, budget=10**6)
    store.put(key_of(1), kv_of(1))
    record_tiers(root, "ram://1MiB")
    return store


def test_a_new_store_is_accessible_to_its_user_alone(root: Path, umask: int) -> None:
    fill(root / "made" / "store")
    assert modes(root) == {(True, "0o700"), (False, "0o600")}


@pytest.mark.parametrize("given", [0o700, 0o750, 0o770, 0o755, 0o2770], ids=oct)
def test_an_existing_directory_keeps_its_permissions_and_passes_them_to_its_files(
    root: Path, umask: int, given: int
) -> None:
    store = root / "store"
    store.mkdir()
    store.chmod(given)
    fill(store)
    assert modes(root) == {(True, oct(given)), (False, oct(given & 0o666))}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_an_entry_that_is_a_link_or_a_pipe_is_a_miss_and_the_next_put_replaces_it(root: Path, kind: str) -> None:
    store = DiskStore(root / "store", budget=10**6)
    store.put(key_of(1), kv_of(1))
    (entry,) = (root / "store").glob("kv/*/*.safetensors")
    elsewhere = entry.replace(root / "elsewhere")
    before = elsewhere.stat().st_mtime_ns
    entry.symlink_to(elsewhere) if kind == "link" else os.mkfifo(entry)
    assert store.get(key_of(1)) is None
    assert not store.contains(key_of(1)) and store.entry(key_of(1)) is None
    assert (store.verify().checked, store.stats().entries) == (0, 0)
    store.touch(key_of(1))
    assert elsewhere.stat().st_mtime_ns == before
    assert store.put(key_of(1), kv_of(1))
    assert same(store.get(key_of(1)), kv_of(1))
    assert entry.is_file() and not entry.is_symlink()
    assert elsewhere.stat().st_mtime_ns == before


def test_a_link_in_the_place_of_an_entry_directory_is_not_followed(root: Path) -> None:
    store = DiskStore(root / "store", budget=10**6)
    store.put(key_of(1), kv_of(1))
    (entry,) = (root / "store").glob("kv/*/*.safetensors")
    elsewhere = entry.parent.replace(root / "elsewhere")
    entry.parent.symlink_to(elsewhere)
    victim = elsewhere / entry.name
    before = victim.stat()
    assert store.get(key_of(1)) is None
    assert not store.contains(key_of(1)) and store.entry(key_of(1)) is None
    assert (store.verify().checked, store.stats().entries) == (0, 0)
    store.touch(key_of(1))
    assert not store.delete(key_of(1))
    assert store.evict(0) == 0
    for replace in (False, True):
        with pytest.raises(StoreError, match=f"{entry.parent} is not a directory; remove it"):
            store.put(key_of(1), kv_of(2), replace)
    after = victim.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert list(elsewhere.iterdir()) == [victim]
    entry.parent.unlink()
    assert store.put(key_of(1), kv_of(1))
    assert same(store.get(key_of(1)), kv_of(1))


def test_entries_are_not_removed_through_a_link_in_the_place_of_their_directory(root: Path) -> None:
    store = DiskStore(root / "store", budget=10**6)
    store.put(key_of(1), kv_of(1))
    store.put(key_of(2), kv_of(2))
    for entry in (root / "store").glob("kv/*/*.safetensors"):
        elsewhere = entry.parent.replace(root / entry.parent.name)
        entry.parent.symlink_to(elsewhere)
    assert store.evict(0) == 0  # the store knows both entries from before
    assert len(list(root.glob("*/*.safetensors"))) == 2


def test_a_store_directory_that_is_a_link_works(root: Path) -> None:
    (root / "other disk").mkdir()
    (root / "store").symlink_to(root / "other disk")
    store = DiskStore(root / "store", budget=10**6)
    for number in (1, 2):
        assert store.put(key_of(number), kv_of(number))
        assert same(store.get(key_of(number)), kv_of(number))
    assert store.delete(key_of(1)) and store.evict(0) > 0
    assert (root / "other disk" / "kv").is_dir() and store.stats().entries == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "dangling link"])
def test_a_byte_count_that_is_a_link_or_a_pipe_is_counted_again(root: Path, kind: str) -> None:
    store = DiskStore(root / "store", budget=10**6)
    store.put(key_of(1), kv_of(1))
    usage, victim = root / "store" / "kv" / "usage", root / "victim"
    usage.unlink()
    if kind == "link":
        victim.write_text("do not overwrite")
    usage.symlink_to(victim) if kind.endswith("link") else os.mkfifo(usage)
    for number in (2, 3):
        assert store.put(key_of(number), kv_of(number))
    assert victim.read_text() == "do not overwrite" if kind == "link" else not victim.exists()
    assert usage.is_file() and not usage.is_symlink()
    assert store._directory.used() == store.stats().nbytes


def test_the_tiers_of_a_directory_are_not_recorded_through_a_link(root: Path) -> None:
    victim = root / "victim"
    victim.write_text("file://")
    (root / "tiers").symlink_to(victim)
    with pytest.raises(StoreError, match="symbolic links"):
        record_tiers(root, "ram://,file://")
    assert victim.read_text() == "file://"
