"""Tests how entries move between tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV
from tests.store.samples import key_of, kv_of, memory_directory, same


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def test_an_entry_read_whole_is_promoted_without_another_read(root: Path) -> None:
    DiskStore(root).put(key_of(1), kv_of(1))
    ram = MemoryStore()
    store = TieredStore([ram, DiskStore(root)])
    found = store.get(key_of(1))
    assert found is not None
    assert found.tier == "disk"
    first = found.layer(0)
    assert found.layer(0).k.data_ptr() == first.k.data_ptr()
    assert not ram.contains(key_of(1))
    found.layer(1)
    held = ram.get(key_of(1))
    assert held is not None
    assert held.layer(0).k.data_ptr() == first.k.data_ptr()
    again = store.get(key_of(1))
    assert again is not None
    assert again.tier == "ram"
    assert same(again, kv_of(1))


@pytest.mark.parametrize("faster", [MemoryStore, DiskStore])
def test_an_entry_deleted_during_a_read_does_not_come_back(root: Path, faster: type) -> None:
    slow = DiskStore(root / "slow")
    slow.put(key_of(1), kv_of(1))
    slow.put(key_of(2), kv_of(2))
    store = TieredStore([faster(root / "fast") if faster is DiskStore else faster(), slow])
    found, other = store.get(key_of(1)), store.get(key_of(2))
    assert found is not None and other is not None
    found.layer(0)
    assert store.delete(key_of(1))
    assert same(found, kv_of(1)), "whoever reads it reads on"
    found.finish()
    other.finish()
    assert {entry.key for entry in store.entries()} == {key_of(2)}
    assert store.tiers[0].contains(key_of(2))


@pytest.mark.parametrize("method", ["get", "delete"])
def test_an_entry_deleted_during_a_look_up_does_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    slow = DiskStore(root)
    slow.put(key_of(1), kv_of(1))
    store = TieredStore([MemoryStore(), slow])
    found: list[StoredKV | None] = []
    get, delete = slow.get, slow.delete

    def got_and_deleted(key: KVKey) -> StoredKV | None:
        monkeypatch.undo()
        handle = get(key)
        assert store.delete(key)
        return handle

    def deleted_behind_a_get(key: KVKey) -> bool:
        found.append(store.get(key))
        return delete(key)

    monkeypatch.setattr(slow, method, got_and_deleted if method == "get" else deleted_behind_a_get)
    if method == "get":
        found.append(store.get(key_of(1)))
    else:
        assert store.delete(key_of(1))
    (handle,) = found
    assert handle is not None
    assert same(handle, kv_of(1)), "whoever reads it reads on"
    handle.finish()
    assert not store.contains(key_of(1))


def test_unfinished_promotions_stay_within_the_faster_tiers_budget(root: Path) -> None:
    disk = DiskStore(root)
    for number in range(4):
        disk.put(key_of(number), kv_of(number))
    ram = MemoryStore(2 * kv_of(0).nbytes)
    store = TieredStore([ram, disk])
    handles = [store.get(key_of(number)) for number in range(4)]
    for number, handle in enumerate(handles):
        assert handle is not None
        assert same(handle, kv_of(number))
    assert {entry.key for entry in ram.entries()} == {key_of(0), key_of(1)}
    unfinished = store.get(key_of(2)), store.get(key_of(3))
    del unfinished, handles, handle
    later = store.get(key_of(2))
    assert later is not None
    assert same(later, kv_of(2))
    assert ram.contains(key_of(2))


def test_an_entry_without_room_in_the_fastest_tier_moves_up_into_the_next_tier(root: Path) -> None:
    slow = DiskStore(root / "slow")
    for number in (0, 1):
        slow.put(key_of(number), kv_of(number))
    ram, fast = MemoryStore(kv_of(0).nbytes), DiskStore(root / "fast")
    store = TieredStore([ram, fast, slow])
    handles = [store.get(key_of(number)) for number in (0, 1)]  # both are read at the same time
    for number, handle in enumerate(handles):
        assert handle is not None and same(handle, kv_of(number))
        handle.finish()
    assert {entry.key for entry in fast.entries()} == {key_of(0), key_of(1)}


def test_an_entry_larger_than_the_faster_tier_is_read_through(root: Path) -> None:
    ram = MemoryStore(10)
    store = TieredStore([ram, DiskStore(root)])
    assert store.put(key_of(1), kv_of(1))
    for _ in range(2):
        found = store.get(key_of(1))
        assert found is not None
        assert same(found, kv_of(1))
        assert found.tier == "disk"
    assert ram.stats().entries == 0


class Refusing(MemoryStore):
    """A lasting tier that refuses every entry."""

    lasts = True

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        raise StoreError("it refuses")


def test_a_refusal_is_an_error_if_no_other_lasting_tier_has_the_entry(root: Path) -> None:
    too_small, large = DiskStore(root / "small", budget=10), DiskStore(root / "large")
    for others in ([MemoryStore()], [MemoryStore(), too_small]):
        with pytest.raises(StoreError, match="it refuses"):
            TieredStore([*others, Refusing()]).put(key_of(1), kv_of(1))
        assert others[0].contains(key_of(1))
    assert TieredStore([MemoryStore(), large, Refusing()]).put(key_of(1), kv_of(1))


def test_a_hit_in_ram_counts_as_use_on_disk(root: Path) -> None:
    disk = DiskStore(root)
    store = TieredStore([MemoryStore(), disk])
    for number in (1, 2):
        store.put(key_of(number), kv_of(number))
    store.get(key_of(1))
    assert [entry.key for entry in disk.entries()] == [key_of(2), key_of(1)]


def test_an_entry_in_two_tiers_is_listed_once(root: Path) -> None:
    store = TieredStore([MemoryStore(), DiskStore(root)])
    store.put(key_of(1), kv_of(1))
    assert [(entry.key, entry.tier) for entry in store.entries()] == [(key_of(1), "ram")]
    stats = store.stats()
    assert (stats.entries, stats.puts) == (1, 1)
    assert [(tier.tier, tier.entries, tier.puts) for tier in stats.tiers] == [("ram", 1, 1), ("disk", 1, 1)]
    assert stats.nbytes == sum(tier.nbytes for tier in stats.tiers)


def test_a_store_without_tiers_is_refused() -> None:
    with pytest.raises(InputError, match="at least one tier"):
        TieredStore([])
