"""Page-locked memory: blocks belong to their views, and the RAM tier lives in them within its budget."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore
from cacheblend_rag.store.kv import ChunkKV, packed
from cacheblend_rag.store.memory import PageLockedMemory
from tests.device.conftest import device, sim  # noqa: F401 - fixtures
from tests.store.samples import key_of, kv_of, same

pytestmark = pytest.mark.device


@pytest.fixture
def memory(sim: str) -> PageLockedMemory:  # noqa: F811
    return PageLockedMemory(torch.device(sim), 1 << 12)


@pytest.fixture
def ram(sim: str) -> MemoryStore:  # noqa: F811
    return page_locked_for(sim, 4 * kv_of(0).nbytes)


def page_locked_for(name: str, budget: int | None) -> MemoryStore:
    store = MemoryStore(budget)
    store.page_lock_for(torch.device(name))
    await_pinning()
    return store


def await_pinning() -> None:
    for thread in threading.enumerate():
        if thread.name == "cacheblend-page-lock":
            thread.join()


def test_a_block_is_free_again_when_its_last_view_is_gone(memory: PageLockedMemory) -> None:
    assert memory.take(1) is None
    assert memory.grow(1 << 12)
    block = memory.take(1 << 12)
    assert block is not None
    assert block.is_pinned()
    view = block[64:128].view(torch.float32)
    array = view.numpy()
    del block
    assert memory.take(1) is None
    del view
    assert memory.take(1) is None
    del array
    assert memory.take(1 << 12) is not None


def test_freed_adjacent_blocks_are_joined(memory: PageLockedMemory) -> None:
    assert memory.grow(1 << 12)
    blocks = [memory.take(512) for _ in range(8)]
    assert memory.take(1) is None
    for index in random.Random(0).sample(range(8), 8):
        blocks[index] = None
    assert memory.take(1 << 12) is not None


def test_pinned_memory_stays_within_the_limit(memory: PageLockedMemory) -> None:
    assert not memory.grow((1 << 12) + 1)
    assert memory.grow(3000)
    assert not memory.grow(3000)
    while memory.grow(1):
        pass
    assert memory.nbytes <= 1 << 12


def test_blocks_of_many_threads_never_overlap(memory: PageLockedMemory) -> None:
    assert memory.grow(1 << 12)

    def work(thread: int) -> int:
        chance = random.Random(thread)
        held: list[torch.Tensor] = []
        for _ in range(300):
            block = memory.take(chance.randrange(1, 900))
            if block is not None:
                held.append(block.fill_(thread))
            assert all((other == thread).all() for other in held)
            if held and chance.random() < 0.6:
                held.pop(chance.randrange(len(held)))
        return len(held)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(4)))) == 4
    assert memory.take(1 << 12) is not None


def test_memory_that_cannot_be_pinned_only_ends_the_growth(
    memory: PageLockedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    assert not memory.grow(1)
    assert memory.take(1) is None


def test_entries_are_stored_in_page_locked_memory_and_evicted_within_its_budget(ram: MemoryStore) -> None:
    for number in range(10):
        assert ram.put(key_of(number), kv_of(number))
        found = ram.get(key_of(number))
        assert found is not None
        assert all(tensor.is_pinned() for layer in found.layers for tensor in layer)
        del found
        await_pinning()  # an entry put before the next slab is ready is not pinned
    assert ram.stats().nbytes <= 4 * kv_of(0).nbytes
    assert ram.stats().evictions > 0


def test_an_entry_written_into_the_stores_own_memory_is_not_copied(ram: MemoryStore) -> None:
    kv = kv_of(1)
    room = ram.room(kv.nbytes)
    assert room is not None
    ram.put(key_of(1), ChunkKV(packed(kv.layers, lambda nbytes: room), kv.start))
    found = ram.get(key_of(1))
    assert found is not None
    assert found.layer(0).k.data_ptr() == room.data_ptr()
    assert same(found, kv)


def test_an_entry_in_use_is_not_overwritten(ram: MemoryStore) -> None:
    ram.put(key_of(1), kv_of(1))
    held = ram.get(key_of(1))
    assert held is not None
    for number in range(2, 12):
        ram.put(key_of(number), kv_of(number))
    assert not ram.contains(key_of(1))
    assert same(held, kv_of(1))


def test_entries_move_into_page_locked_memory_when_the_device_is_known(sim: str) -> None:  # noqa: F811
    store = MemoryStore(1 << 12)
    store.put(key_of(1), kv_of(1))
    store.page_lock_for(torch.device("cpu"))
    assert not store.get(key_of(1)).layer(0).k.is_pinned()
    store.page_lock_for(torch.device(sim))
    found = store.get(key_of(1))
    assert found.layer(0).k.is_pinned()
    assert same(found, kv_of(1))


def test_slabs_are_added_on_demand_without_a_budget(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("cacheblend_rag.store.memory.SLAB", 1 << 12)
    store = MemoryStore()
    store.page_lock_for(torch.device(sim))
    for number in range(40):
        room = store.room(512, wait=True)
        assert room is not None
        store.put(key_of(number), kv_of(number))
    assert store.stats().entries == 40


def test_a_promoted_entry_is_read_directly_into_its_final_memory(device: str, tmp_path: Path) -> None:  # noqa: F811
    DiskStore(tmp_path).put(key_of(1), kv_of(1, layers=4))
    ram = page_locked_for(device, 1 << 12)
    found = TieredStore([ram, DiskStore(tmp_path)]).get(key_of(1))
    assert found is not None
    read = [found.layer(index).k.data_ptr() for index in (2, 0, 3, 1)]
    kept = ram.get(key_of(1))
    assert kept is not None
    assert [kept.layer(index).k.data_ptr() for index in (2, 0, 3, 1)] == read
    assert kept.layer(0).k.is_pinned()
    assert same(kept, kv_of(1, layers=4))
