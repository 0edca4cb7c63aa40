"""Tests features of remote tiers alone: ranged reads, several clients, a time to live, addresses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import obstore.store
import pytest
import redis
import torch

from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store.codec import get_codec
from cacheblend_rag.store.kvfile import PLAIN, EntryFormat
from cacheblend_rag.store.objects import ObjectStore
from cacheblend_rag.store.redis import RedisStore
from cacheblend_rag.store.remote import HEAD_BYTES, RemoteStore
from tests.store.samples import key_of, kv_of, ranked, same

LARGE = {"layers": 4, "tokens": 400}  # several times the size of a look-up's first read


class Medium:
    """A remote tier's server, with access to its stored bytes."""

    def __init__(self, kind: str, at: Any):
        self.kind, self.at = kind, at

    def client(self, **options: Any) -> RemoteStore:
        return RedisStore(self.at, **options) if self.kind == "redis" else ObjectStore(self.at, **options)

    def change(self, number: int, change: Callable[[bytearray], None]) -> None:
        """Change the stored bytes of an entry without any client's knowledge."""
        if self.kind == "redis":
            server = redis.Redis.from_url(self.at)
            (name,) = server.keys(f"cacheblend:kv:{key_of(number)}:*")
            data = bytearray(server.get(name))
            change(data)
            server.set(name, bytes(data))
        else:
            (path,) = [each["path"] for each in self.at.list().collect() if key_of(number) in each["path"]]
            data = bytearray(self.at.get(path).bytes())
            change(data)
            self.at.put(path, bytes(data))


@pytest.fixture(params=["redis", "objects"])
def medium(request: pytest.FixtureRequest) -> Medium:
    if request.param == "redis":
        return Medium("redis", request.getfixturevalue("redis_url"))
    return Medium("objects", obstore.store.MemoryStore())


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


def flip_first(data: bytearray) -> None:
    data[10] ^= 1


def cut(data: bytearray) -> None:
    del data[-1]


def empty(data: bytearray) -> None:
    data.clear()


def test_reading_a_layer_takes_one_ranged_read_of_that_layer_alone(medium: Medium, monkeypatch) -> None:
    store = medium.client()
    store.put(key_of(1), kv_of(1, **LARGE))
    asked = []
    read = store._range
    monkeypatch.setattr(
        store, "_range", lambda key, version, offset, n: asked.append(n) or read(key, version, offset, n)
    )
    found = store.get(key_of(1))
    assert asked == []
    for index in (3, 2):
        assert all(map(torch.equal, found.layer(index), kv_of(1, **LARGE).layer(index)))
    layer_bytes = kv_of(1, **LARGE).nbytes // 4
    assert layer_bytes > HEAD_BYTES // 2
    assert asked == [layer_bytes] * 2
    assert store.stats().reads.nbytes == 2 * layer_bytes


def test_reading_an_encoded_layer_takes_one_ranged_read(medium: Medium, monkeypatch) -> None:
    store, kv = medium.client(format=EntryFormat("int8")), kv_of(1, layers=12, tokens=400)
    store.put(key_of(1), kv)
    asked = []
    read = store._range
    monkeypatch.setattr(
        store, "_range", lambda key, version, offset, n: asked.append(n) or read(key, version, offset, n)
    )
    found = medium.client().get(key_of(1))
    found.source._store = store
    for index in (11, 10):
        assert all(map(torch.equal, found.layer(index), kv.layer(index)))
    assert len(asked) == 2
    assert sum(asked) < kv.nbytes // 6


def test_a_remote_entry_in_an_unknown_codec_is_a_miss_is_logged_and_stays(
    medium: Medium, caplog: pytest.LogCaptureFixture
) -> None:
    later = get_codec("int8")
    later.name = "int4"
    form = EntryFormat()
    form.codec = later
    store = medium.client(format=form)
    store.put(key_of(1), kv_of(1))
    reader = medium.client()
    assert reader.get(key_of(1)) is None
    assert "unknown KV codec 'int4'" in caplog.text
    assert reader.contains(key_of(1))
    assert reader.verify().unreadable == (key_of(1),)


def test_an_entry_put_by_a_client_is_found_by_another_client(medium: Medium) -> None:
    medium.client().put(key_of(1), ranked(kv_of(1, **LARGE)))
    found = medium.client().get(key_of(1))
    assert found.tier == medium.client().tier
    assert same(found, kv_of(1, **LARGE))
    assert found.static_deviation() is not None


@pytest.mark.parametrize("damage", [flip_last, flip_first, cut, empty])
def test_a_damaged_remote_entry_is_a_miss_is_removed_and_can_be_put_again(medium: Medium, damage) -> None:
    store, kv = medium.client(), kv_of(1, **LARGE)
    store.put(key_of(1), kv)
    medium.change(1, damage)
    found = store.get(key_of(1))
    if found is not None:
        with pytest.raises(DamagedKVError):
            same(found, kv)
    assert not store.contains(key_of(1))
    assert store.stats().entries == 0
    assert store.put(key_of(1), kv)
    assert same(store.get(key_of(1)), kv)


def test_verify_finds_remote_damage_and_removes_it_unless_repair_is_off(medium: Medium) -> None:
    store = medium.client()
    for number in (1, 2):
        store.put(key_of(number), kv_of(number, **LARGE))
    medium.change(2, flip_last)
    assert store.verify(repair=False).damaged == (key_of(2),)
    report = store.verify()
    assert (report.checked, report.damaged, report.unreadable) == (2, (key_of(2),), ())
    assert [entry.key for entry in store.entries()] == [key_of(1)]


def test_a_late_reader_of_a_damaged_remote_entry_does_not_remove_its_replacement(medium: Medium) -> None:
    store, kv = medium.client(), kv_of(1, **LARGE)
    store.put(key_of(1), kv)
    medium.change(1, flip_last)
    late = store.get(key_of(1))
    assert store.put(key_of(1), kv, replace=True)
    with pytest.raises((DamagedKVError, StoreUnavailableError)):
        same(late, kv)
    assert same(store.get(key_of(1)), kv)


def test_an_entry_removed_under_a_reader_cannot_be_read_and_is_not_damage(medium: Medium) -> None:
    store, kv = medium.client(), kv_of(1, **LARGE)
    store.put(key_of(1), kv)
    found = store.get(key_of(1))
    medium.client().delete(key_of(1))
    with pytest.raises(StoreUnavailableError, match="removed"):
        same(found, kv)
    assert store.stats().damaged == 0
    assert store.put(key_of(2), kv), "the tier itself is well"


def test_an_entry_replaced_under_a_reader_gives_no_mixture(medium: Medium) -> None:
    store = medium.client()
    store.put(key_of(1), kv_of(1, **LARGE))
    found = store.get(key_of(1))
    medium.client().put(key_of(1), kv_of(2, **LARGE), replace=True)
    with pytest.raises(StoreUnavailableError):
        same(found, kv_of(1, **LARGE))
    assert same(store.get(key_of(1)), kv_of(2, **LARGE))


def test_an_expired_entry_is_a_miss_and_frees_its_room(medium: Medium) -> None:
    brief = medium.client(ttl_s=0.001)
    brief.put(key_of(1), kv_of(1))
    while medium.client().contains(key_of(1)) and brief.contains(key_of(1)):
        pass  # waits a millisecond
    assert brief.get(key_of(1)) is None
    assert list(brief.entries()) == []
    assert brief.stats().nbytes == 0


def test_entries_do_not_expire_by_default(redis_url: str) -> None:
    RedisStore(redis_url).put(key_of(1), kv_of(1))
    server = redis.Redis.from_url(redis_url)
    assert [server.ttl(name) for name in server.keys("cacheblend:kv:*")] == [-1]


def test_clients_that_put_at_once_share_one_budget(redis_url: str) -> None:
    size = len(RedisStore(redis_url).get(key_of(0)) or b"") or _size_in(redis_url)
    stores = [RedisStore(redis_url, 5 * size) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: [stores[i].put(key_of(n), kv_of(n)) for n in range(10 * i, 10 * i + 10)], range(4)))
    stats = stores[0].stats()
    assert (stats.entries, stats.nbytes) == (5, 5 * size)
    server = redis.Redis.from_url(redis_url)
    assert sum(server.strlen(name) for name in server.keys("cacheblend:kv:*")) == 5 * size


def _size_in(url: str) -> int:
    store = RedisStore(url)
    store.put(key_of(0), kv_of(0))
    size = store.stats().nbytes
    store.delete(key_of(0))
    return size


def test_an_entry_dropped_by_the_server_is_a_miss_and_no_longer_counted(redis_url: str) -> None:
    store = RedisStore(redis_url)
    store.put(key_of(1), kv_of(1))
    server = redis.Redis.from_url(redis_url)
    server.delete(*server.keys("cacheblend:kv:*"))
    assert not store.contains(key_of(1))
    assert (store.stats().entries, store.stats().nbytes) == (0, 0)
    assert store.put(key_of(1), kv_of(1))


def test_bytes_of_a_writer_that_died_before_publishing_expire(redis_url: str, monkeypatch) -> None:
    store = RedisStore(redis_url)
    monkeypatch.setattr(store, "_run", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store._write(key_of(1), b"some bytes", replace=False)
    server = redis.Redis.from_url(redis_url)
    assert [server.ttl(name) > 0 for name in server.keys("cacheblend:kv:*")] == [True]
    assert RedisStore(redis_url).stats().entries == 0


def test_a_full_server_is_reported_and_the_tier_stays_in_use(redis_url: str, valkey) -> None:
    store = RedisStore(redis_url)
    store.put(key_of(1), kv_of(1))
    server = redis.Redis.from_url(redis_url)
    server.config_set("maxmemory", 1)
    try:
        with pytest.raises(Exception, match="memory is full; give the tier a budget"):
            store.put(key_of(2), kv_of(2))
        assert same(store.get(key_of(1)), kv_of(1))
    finally:
        server.config_set("maxmemory", 0)


@pytest.mark.parametrize("dropped", ["entries", "used"])
def test_a_server_that_drops_the_index_of_entries_still_accepts_writes(redis_url: str, dropped: str) -> None:
    size = len(PLAIN.serialized(PLAIN.encode(key_of(1), kv_of(1))))
    store = RedisStore(redis_url, budget=3 * size)
    for number in range(3):
        store.put(key_of(number), kv_of(number))
    redis.Redis.from_url(redis_url).delete(f"cacheblend:{dropped}")  # maxmemory-policy allkeys-random does so
    for number in range(10, 20):
        assert store.put(key_of(number), kv_of(number))
        assert same(store.get(key_of(number)), kv_of(number))
    assert len(list(store.entries())) <= 3


def test_a_client_with_a_budget_counts_entries_of_other_clients(medium: Medium) -> None:
    other = medium.client()
    for number in (1, 2, 3):
        other.put(key_of(number), kv_of(number))
    size = other.stats().nbytes // 3
    store = medium.client(budget=3 * size)
    store.get(key_of(1))
    assert store.put(key_of(4), kv_of(4))
    assert {entry.key for entry in store.entries()} == {key_of(1), key_of(3), key_of(4)}
