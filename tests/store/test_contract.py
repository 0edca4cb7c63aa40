"""Tests the contract of every store, and the optional methods of stores that have them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import obstore.store
import pytest
import torch

from cacheblend_rag.errors import InputError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore, kvfile, open_store
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, flat
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.objects import ObjectStore
from cacheblend_rag.store.redis import RedisStore
from examples.third_party_tier.cacheblend_sqlite_tier import SQLiteStore
from tests.store.samples import key_of, kv_of, memory_directory, numbers, ranked, same, sample_keys

Open = Callable[[int | None], KVStore]
"""Opens a store with room for a number of sample entries in each of its tiers; None for no limit."""


class Settled(TieredStore):
    """Waits for entries written behind before a put returns, so that listings have them."""

    def put(self, key: KVKey, kv: ChunkKV, replace: bool = False) -> bool:
        stored = super().put(key, kv, replace)
        self.flush()
        return stored and self.contains(key)


PLAIN = ["memory", "disk", "tiered", "tiered_disk_only", "tiered_behind", "redis", "objects", "s3", "tiered_redis"]
SIX = ["sqlite", "tiered_sqlite"]
"""Stores with only the required methods; they run every test of these methods."""
ENCODED = ["memory:int8", "disk:int8", "redis:int8", "objects:int8"]
ENCRYPTED = [f"{kind}@keys" for kind in ("disk", "disk:int8", "redis", "objects", "sqlite")]


_Test = TypeVar("_Test", bound=Callable[..., None])


def needs_listing(test: _Test) -> _Test:
    """Run a test only with stores that list, verify and evict."""
    test.needs_listing = True  # type: ignore[attr-defined]
    return test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "open_with" in metafunc.fixturenames:
        more = hasattr(metafunc.function, "needs_listing")
        kinds = [kind for kind in PLAIN + SIX + ENCODED + ENCRYPTED if not (more and "sqlite" in kind)]
        # `make quick` runs codecs and keys over files alone; a test on the simulated S3 takes most of a second.
        quick = [kind for kind in kinds if kind in PLAIN + SIX or kind.startswith("disk") if kind != "s3"]
        parameters = [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in kinds]
        metafunc.parametrize("open_with", parameters, indirect=True)


@pytest.fixture
def open_with(request: pytest.FixtureRequest) -> Iterator[Open]:
    described, _, encrypted = request.param.partition("@")
    kind, _, codec = described.partition(":")
    codec = codec or "none"
    form = EntryFormat(codec, sample_keys() if encrypted else None)

    def remote() -> dict[str, Callable[[int | None], KVStore]]:
        if kind in {"redis", "tiered_redis"}:
            url = request.getfixturevalue("redis_url")
            return {"redis": lambda budget: RedisStore(url, budget, format=form)}
        if kind == "s3":
            url = request.getfixturevalue("s3_url")
            endpoint = request.getfixturevalue("s3_endpoint")
            config = {"endpoint": endpoint}
            return {"s3": lambda budget: ObjectStore.at(url, budget, config, timeout_s=30, format=form)}
        bucket = obstore.store.MemoryStore()
        return {"objects": lambda budget: ObjectStore(bucket, budget, format=form)}

    with memory_directory() as root:
        yield from _opener(kind, {"format": form}, root, remote())


def _opener(
    kind: str, options: dict[str, Any], root: Path, remote: dict[str, Callable[[int | None], KVStore]]
) -> Iterator[Open]:
    opened: list[KVStore] = []
    measured = DiskStore(root / "measured", **options)
    measured.put(key_of(0), kv_of(0))
    file_size = measured.stats().nbytes
    in_ram = {"format": EntryFormat(options["format"].codec.name)} if kind == "memory" else {}
    held = MemoryStore(**in_ram)
    held.put(key_of(0), kv_of(0))
    held_size = held.stats().nbytes

    def open_it(entries: int | None = None) -> KVStore:
        ram = MemoryStore(None if entries is None else entries * held_size, **in_ram)
        disk = DiskStore(root / "store", None if entries is None else entries * file_size, **options)
        budget = None if entries is None else entries * file_size
        behind = DiskStore(root / "store", budget, writes="back", **options)
        stores: dict[str, KVStore] = {
            "memory": ram,
            "disk": disk,
            "tiered": TieredStore([ram, disk]),
            "tiered_disk_only": TieredStore([disk]),
            "tiered_behind": Settled([ram, behind]),
            **{name: opened(budget) for name, opened in remote.items()},
        }
        if "sqlite" in kind:
            stores["sqlite"] = SQLiteStore(root / "kv.db", budget, **options)
            stores["tiered_sqlite"] = TieredStore([ram, stores["sqlite"]])
        if "redis" in stores:
            stores["tiered_redis"] = TieredStore([ram, stores["redis"]])
        opened.append(stores[kind])
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(open_with: Open) -> KVStore:
    return open_with(None)


def test_a_tier_must_have_six_methods_and_the_example_has_no_other() -> None:
    must = {*KVStore.__abstractmethods__, "close"}
    assert must == {"get", "put", "contains", "delete", "entry", "close"}
    assert {name for name in vars(SQLiteStore) if not name.startswith("_")} == must


def test_a_layer_is_one_block_keys_then_values(store: KVStore) -> None:
    store.put(key_of(1), kv_of(1, layers=3))
    found = store.get(key_of(1))
    assert found is not None
    for index in range(3):
        k, v = kv_of(1, layers=3).layer(index)
        elements = flat(found.layer(index))
        assert elements is not None
        assert torch.equal(elements, torch.cat([k.flatten(), v.flatten()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_stored_entry_is_read_back_bit_for_bit(store: KVStore, dtype: torch.dtype) -> None:
    assert store.put(key_of(1), kv_of(1, dtype=dtype))
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1, dtype=dtype))


def test_layers_may_differ_in_shape_and_dtype_and_be_read_in_any_order(store: KVStore) -> None:
    kv = ChunkKV(
        [LayerKV(numbers(heads, 5, dim).to(dtype), numbers(heads, 5, 2 * dim).to(dtype))
         for heads, dim, dtype in [(1, 8, torch.float32), (4, 2, torch.bfloat16), (2, 6, torch.float16)]],
        start=9,
    )  # fmt: skip
    assert store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found is not None
    for index in (2, 0, 1, 2):
        assert all(torch.equal(a, b) for a, b in zip(found.layer(index), kv.layer(index), strict=True))
    assert same(found, kv)


def test_views_and_shared_tensors_are_stored_as_their_own_values(store: KVStore) -> None:
    batch = numbers(3, 4, 2, 5, 8)
    shared = LayerKV(batch[1, 0].transpose(0, 1), batch[1, 0].transpose(0, 1))
    kv = ChunkKV([shared, shared, LayerKV(batch[1, 2][:, 1:4], batch[1, 3][:, 1:4])], start=0)
    expected = ChunkKV([LayerKV(k.clone(), v.clone()) for k, v in kv.layers], start=0)
    assert store.put(key_of(1), kv)
    batch.zero_()
    found = store.get(key_of(1))
    assert found is not None
    assert all(
        torch.equal(a, b) for index in range(3) for a, b in zip(found.layer(index), expected.layer(index), strict=True)
    )


def test_a_slice_of_a_batch_does_not_keep_the_batch_in_memory() -> None:
    batch = torch.randn(64, 2, 5, 8)
    store = MemoryStore()
    store.put(key_of(1), ChunkKV([LayerKV(batch[3], batch[4])], start=0))
    found = store.get(key_of(1))
    assert found is not None
    assert [tensor.untyped_storage().nbytes() for tensor in found.layer(0)] == [2 * 2 * 5 * 8 * 4] * 2
    assert flat(found.layer(0)) is not None
    assert store.stats().nbytes == 2 * 2 * 5 * 8 * 4


def test_an_entry_without_tokens_can_be_stored(store: KVStore) -> None:
    assert store.put(key_of(1), kv_of(1, tokens=0))
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1, tokens=0))


def test_a_missing_key_is_a_miss(store: KVStore) -> None:
    assert store.get(key_of(1)) is None
    assert not store.contains(key_of(1))
    assert not store.delete(key_of(1))
    assert store.entry(key_of(1)) is None
    assert store.stats().misses == 1


def test_the_first_put_of_a_key_wins(store: KVStore) -> None:
    assert store.put(key_of(1), kv_of(1))
    assert store.put(key_of(1), kv_of(2))
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1))
    assert store.stats().puts == 1


def test_delete_removes_an_entry_and_leaves_its_readers_whole(store: KVStore) -> None:
    store.put(key_of(1), kv_of(1))
    found = store.get(key_of(1))
    assert found is not None
    assert store.delete(key_of(1))
    assert not store.contains(key_of(1))
    assert store.get(key_of(1)) is None
    assert same(found, kv_of(1))


@needs_listing
def test_the_least_recently_used_entry_is_evicted_first_to_keep_the_budget(open_with: Open) -> None:
    store = open_with(3)
    for number in (1, 2, 3):
        assert store.put(key_of(number), kv_of(number))
    store.get(key_of(1))
    store.touch(key_of(2))
    assert store.put(key_of(4), kv_of(4))
    assert [entry.key for entry in store.entries()] == [key_of(1), key_of(2), key_of(4)]
    assert store.put(key_of(1), kv_of(1))
    assert store.put(key_of(5), kv_of(5))
    assert [entry.key for entry in store.entries()] == [key_of(4), key_of(1), key_of(5)]
    assert store.stats().evictions >= 2


@needs_listing
def test_describing_one_entry_agrees_with_the_listing_and_does_not_count_as_use(open_with: Open) -> None:
    store = open_with(3)
    for number in (1, 2, 3):
        store.put(key_of(number), kv_of(number))
    listed = {entry.key: entry for entry in store.entries()}
    assert [store.entry(key_of(number)) for number in (1, 2, 3)] == [listed[key_of(number)] for number in (1, 2, 3)]
    assert store.entry(key_of(9)) is None
    store.put(key_of(4), kv_of(4))
    assert store.entry(key_of(1)) is None


def test_an_entry_larger_than_the_budget_is_refused_and_evicts_nothing(open_with: Open) -> None:
    store = open_with(2)
    store.put(key_of(1), kv_of(1))
    store.put(key_of(2), kv_of(2))
    assert not store.put(key_of(3), kv_of(3, tokens=1000))
    assert [store.contains(key_of(number)) for number in (1, 2, 3)] == [True, True, False]
    if store.lists:
        assert {entry.key for entry in store.entries()} == {key_of(1), key_of(2)}


def test_a_file_whose_header_exceeds_the_budget_is_refused(tmp_path: Path) -> None:
    with DiskStore(tmp_path, budget=kv_of(1).nbytes + 1) as store:
        assert not store.put(key_of(1), kv_of(1))
        assert (store.stats().entries, list(tmp_path.rglob("*.safetensors"))) == (0, [])


@needs_listing
def test_a_replaced_entry_evicts_no_other_entry(open_with: Open) -> None:
    store = open_with(2)
    for number in (1, 2):
        store.put(key_of(number), kv_of(number))
    assert store.put(key_of(1), kv_of(1), replace=True)
    assert {entry.key for entry in store.entries()} == {key_of(1), key_of(2)}


@needs_listing
def test_evict_frees_no_more_than_necessary(store: KVStore) -> None:
    for number in range(4):
        store.put(key_of(number), kv_of(number))
    before = store.stats().nbytes
    deepest = store.stats().tiers[-1].nbytes if store.stats().tiers else before
    freed = store.evict(deepest // 2)
    assert store.stats().nbytes == before - freed
    assert key_of(3) in {entry.key for entry in store.entries()}
    assert store.evict(before) == 0


@needs_listing
def test_hits_misses_and_puts_are_counted(store: KVStore) -> None:
    store.put(key_of(1), kv_of(1))
    store.get(key_of(1))
    found = store.get(key_of(1))
    store.get(key_of(2))
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.puts, stats.entries) == (2, 1, 1, 1)
    assert found is not None
    assert stats.nbytes >= found.stored_nbytes > 0


@needs_listing
def test_contains_and_listing_do_not_count_as_use(store: KVStore) -> None:
    for number in (1, 2):
        store.put(key_of(number), kv_of(number))
    assert store.contains(key_of(1))
    assert store.verify().damaged == ()
    assert [entry.key for entry in store.entries()] == [key_of(1), key_of(2)]
    assert store.stats().hits == 0


def test_an_entry_of_a_later_version_is_a_miss_and_stays(open_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(kvfile, "FORMAT", "cacheblend-kv/2")
        open_with(None).put(key_of(1), kv_of(1))
    store = open_with(None)
    if not store.lasts:
        return  # this store has no files
    assert store.get(key_of(1)) is None
    assert store.contains(key_of(1)) and store.stats().damaged == 0
    if store.lists:
        assert store.verify().damaged == ()
    assert store.contains(key_of(1))


@needs_listing
def test_verify_checks_every_entry(store: KVStore) -> None:
    for number in range(3):
        store.put(key_of(number), kv_of(number))
    assert store.verify().checked >= 3


def test_threads_share_a_store(open_with: Open) -> None:
    store, made = open_with(6), [kv_of(number) for number in range(8)]
    barrier = threading.Barrier(4)

    def work(thread: int) -> int:
        chance = random.Random(thread)
        barrier.wait()
        read = 0
        for step in range(40):
            number = chance.randrange(8)
            found = store.get(key_of(number))
            if found is None:
                store.put(key_of(number), made[number])
            else:
                assert same(found, made[number])
                read += 1
            if step % 20 == 19:
                store.evict(0) if store.lists else store.delete(key_of(number))
        return read

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    assert store.stats().damaged == 0
    if store.lists:
        assert store.verify().damaged == ()


def test_one_handle_serves_many_threads(store: KVStore) -> None:
    kv = kv_of(1, layers=16, tokens=50)
    store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found is not None
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: same(found, kv), range(12)))


def test_open_store_without_a_path_has_only_memory() -> None:
    (ram,) = open_store().tiers
    assert isinstance(ram, MemoryStore) and ram.budget is not None


def test_open_store_with_a_path_stores_entries_on_disk_within_its_budgets(tmp_path: Path) -> None:
    store = open_store(tmp_path / "deep" / "store", ram_budget=1000, disk_budget=100_000)
    assert [tier.budget for tier in store.stats().tiers] == [1000, 100_000]
    store.put(key_of(1), kv_of(1))
    store.close()
    again = open_store(tmp_path / "deep" / "store")
    found = again.get(key_of(1))
    assert found is not None
    assert found.tier == "disk"
    assert same(found, kv_of(1))
    assert all(tier.budget for tier in again.stats().tiers)


def test_keys_with_path_characters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.safetensors").touch()
    store = DiskStore(tmp_path / "store")
    for key in ("../../precious", "", "ab", "AB" * 20, "ab" * 20 + "\n"):
        with pytest.raises(InputError, match="hex digits"):
            store.delete(KVKey(key))
    assert (tmp_path / "precious.safetensors").exists()


def test_a_static_deviation_is_stored_with_the_layers(store: KVStore) -> None:
    store.put(key_of(1), ranked(kv_of(1)))
    found = store.get(key_of(1))
    assert found is not None
    assert torch.equal(found.static_deviation(), torch.tensor([1.0, 2.0, 3.0]))
    assert same(found, kv_of(1))
    store.put(key_of(2), kv_of(2))
    assert store.get(key_of(2)).static_deviation() is None


@needs_listing
def test_replacing_an_entry_adds_its_static_deviation_and_disturbs_no_reader(open_with: Open) -> None:
    store = open_with(3)
    for number in (1, 2):
        store.put(key_of(number), kv_of(number))
    reader = store.get(key_of(1))
    assert store.put(key_of(1), ranked(kv_of(1)))
    assert store.get(key_of(1)).static_deviation() is None, "a plain put must leave an entry as it is"
    assert store.put(key_of(1), ranked(kv_of(1)), replace=True)
    assert store.get(key_of(1)).static_deviation() is not None
    assert same(reader, kv_of(1))
    assert same(store.get(key_of(2)), kv_of(2)), "the room of the former entry must be free again"
    assert store.put(key_of(3), kv_of(3), replace=True)
    assert store.stats().entries in (2, 3)  # on disk the rank takes extra room


def test_a_promoted_entry_takes_its_static_deviation_along(tmp_path: Path) -> None:
    DiskStore(tmp_path).put(key_of(1), ranked(kv_of(1)))
    ram = MemoryStore()
    with TieredStore([ram, DiskStore(tmp_path)]) as store:
        store.get(key_of(1)).finish()
        assert torch.equal(ram.get(key_of(1)).static_deviation(), torch.tensor([1.0, 2.0, 3.0]))
