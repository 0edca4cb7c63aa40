"""Acts as other processes on a store in the tests. A fork server imports it, so it imports little."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.errors import DamagedKVError, StoreError
from cacheblend_rag.store import DiskStore, TieredStore
from tests.forking import preload
from tests.store.samples import key_of, kv_of, same

_context = multiprocessing.get_context("forkserver")
preload(__name__)

NOBODY = 65534


def start(function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Start ``function(connection, *args)`` in a new process; return the process and our end of the connection."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def call(function: Callable[..., None], *args: Any) -> Any:
    """Run ``function(connection, *args)`` to its end in a new process and return what it sent."""
    process, connection = start(function, *args)
    try:
        result = connection.recv()
    except EOFError:
        result = None
    process.join()
    assert process.exitcode == 0, f"{function.__name__} failed"
    return result


def attempt(function: Callable[[], Any]) -> str:
    """Return the message of the StoreError that ``function`` raises, or "" when it raises none."""
    try:
        function()
    except StoreError as error:
        return str(error)
    return ""


def put_until_killed(connection: Connection, root: Path, first: int, budget: int | None) -> None:
    """Put entry after entry, and report each one that is stored."""
    torch.set_num_threads(1)
    store = DiskStore(root, budget)
    number = first
    while True:
        assert store.put(key_of(number), kv_of(number, layers=4, tokens=300))
        connection.send(number)
        number += 1


def die_at_step(connection: Connection, root: Path, number: int, budget: int, step: int) -> None:
    """Put one entry and die at the ``step``-th file system call of the store."""
    store = DiskStore(root, budget)
    kv = kv_of(number)
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event == "open" or event.startswith(("os.", "fcntl.", "shutil.")):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    assert store.put(key_of(number), kv)
    store.close()
    connection.send(seen)


def tiers_at(root: Path, budget: int) -> TieredStore:
    """Make a quick disk with little room in front of a slow one with room for all."""
    return TieredStore([DiskStore(root / "quick", budget), DiskStore(root / "slow")])


def use_tiers_until_killed(connection: Connection, root: Path, first: int, budget: int, seed: int) -> None:
    """Put entries, promote some, evict from the quick disk and delete there entries that the slow one has; report each
    put."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    store = tiers_at(root, budget)
    quick, number = store.tiers[0], first
    while True:
        action = chance.choice(["put", "put", "read", "read", "read", "evict", "delete"])
        if action == "put":
            assert store.put(key_of(number), kv_of(number, layers=4, tokens=300))
            connection.send(number)
            number += 1
        elif action == "read" and number:
            found = store.get(key_of(chance.randrange(number)))
            if found is not None:
                for index in range(found.num_layers):
                    found.layer(index)
                found.finish()
        elif action == "evict":
            quick.evict(budget // 2)
        elif action == "delete" and number:
            quick.delete(key_of(chance.randrange(number)))


def mingle(connection: Connection, root: Path, seed: int, budget: int, steps: int, seconds: float = 0.0) -> None:
    """Run random operations on a store that other processes use, too; send the number of entries read. Runs for
    ``steps`` steps, and for ``seconds`` at least."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    store = DiskStore(root, budget)
    handles: list[tuple[int, Any]] = []
    read = 0
    until = time.monotonic() + seconds
    for step in itertools.count():
        if step >= steps and time.monotonic() >= until:
            break
        number = chance.randrange(12)
        action = chance.choice(["put", "put", "put", "get", "get", "get", "read", "delete", "evict", "list"])
        if action == "put":
            assert store.put(key_of(number), kv_of(number))
        elif action == "get":
            found = store.get(key_of(number))
            if found is not None:
                handles.append((number, found))
        elif action == "read" and handles:
            known, handle = handles.pop(chance.randrange(len(handles)))
            assert same(handle, kv_of(known))
            read += 1
        elif action == "delete":
            store.delete(key_of(number))
        elif action == "evict":
            store.evict(budget // 2)
        elif action == "list":
            assert all(entry.nbytes > 0 for entry in store.entries())
    assert store.stats().damaged == 0
    store.close()
    connection.send(read)


def under_file_size_limit(connection: Connection, root: Path, limit: int) -> None:
    """Put an entry larger than the file size limit, then put it without the limit."""
    store = DiskStore(root)
    assert store.put(key_of(1), kv_of(1))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    message = attempt(lambda: store.put(key_of(2), kv_of(2, tokens=5000)))
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1))
    assert store.get(key_of(2)) is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.put(key_of(2), kv_of(2, tokens=5000))
    store.close()
    connection.send(message)


def without_permission(connection: Connection, root: Path, uid: int | None) -> None:
    """Read a store as a user who may not write to it, and try to write."""
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    store = DiskStore(root, budget=10**6)
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1))
    assert store.verify(repair=False).checked == store.stats().entries
    actions: dict[str, Callable[[], Any]] = {
        "put": lambda: store.put(key_of(3), kv_of(3)),
        "delete": lambda: store.delete(key_of(1)),
        "evict": lambda: store.evict(0),
    }
    messages = {name: attempt(action) for name, action in actions.items()}
    damaged = store.get(key_of(2))
    assert damaged is not None
    with suppress(DamagedKVError):
        damaged.layer(0)
        raise AssertionError("damage unnoticed")
    assert store.get(key_of(2)) is None
    assert not store.contains(key_of(2))
    store.close()
    connection.send(messages)


def without_read_permission(connection: Connection, root: Path, uid: int | None) -> None:
    """Open a store whose directory this user may not list."""
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    connection.send(attempt(lambda: DiskStore(root)))


def without_file_descriptors(connection: Connection, root: Path) -> None:
    """Read an entry while no file can be opened, and again afterwards."""
    store = DiskStore(root)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    assert store.get(key_of(1)) is None
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = store.get(key_of(1))
    assert found is not None
    assert same(found, kv_of(1))
    connection.send(store.stats().damaged)
