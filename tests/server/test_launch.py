"""Tests how the processes of a server are started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from argparse import Namespace
from multiprocessing.connection import Connection
from multiprocessing.util import register_after_fork
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm import platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.utils import ompmultiprocessing

from cacheblend_rag.server import forking
from tests.server import forked  # noqa: F401 - what processes are forked from has imported vLLM

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def look_at(sock: socket.socket, told: Connection) -> None:
    told.send((sock.fileno(), signal.set_wakeup_fd(-1), os.environ[METHOD]))


class Config:
    """The part of vLLM's config that is read."""

    def __init__(self, world_size: int = 1, skip: bool = False):
        self.parallel_config = SimpleNamespace(
            world_size=world_size, numa_bind=False, distributed_executor_backend="mp"
        )
        self.skip = skip


@pytest.fixture(params=[True, False])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    on_a_platform(monkeypatch, request.param)
    return request.param


def on_a_platform(monkeypatch: pytest.MonkeyPatch, cpu: bool, world_size: int = 1) -> None:
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", lambda self: Config(world_size))
    monkeypatch.setattr(
        AsyncEngineArgs,
        "from_cli_args",
        classmethod(lambda cls, args: vars(made := cls.__new__(cls)).update(vars(args)) or made),
    )
    monkeypatch.setattr(entry, "build_async_engine_client_from_engine_args", lambda arguments: arguments)
    monkeypatch.setattr(forking, "_compute", lambda config, threads: None)


def backend(sock: socket.socket, chosen: str | None = None) -> str:
    arguments = forking.forked_engine(Namespace(distributed_executor_backend=chosen), sock, 2)
    return str(arguments.create_engine_config().parallel_config.distributed_executor_backend)


def test_the_forked_engine_on_a_cpu_holds_neither_the_socket_nor_the_wakeup_descriptor(cpu: bool) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    loop, waked = socket.socketpair()
    waked.setblocking(False)
    with socket.socket() as sock, loop, waked:
        assert backend(sock) == ("uni" if cpu else "mp")
        if not cpu:  # a forked process could not use a GPU that its parent uses
            assert os.environ[METHOD] == "spawn"
            return
        before = signal.set_wakeup_fd(waked.fileno())
        try:
            process = multiprocessing.get_context(os.environ[METHOD]).Process(target=look_at, args=(sock, there))
            process.start()
        finally:
            signal.set_wakeup_fd(before)
        seen = here.recv()
        process.join()
        assert seen == (-1, -1, "spawn")
        assert sock.fileno() != -1


def test_workers_get_their_own_processes_if_there_are_several_or_the_user_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_platform(monkeypatch, True, world_size=2)
    with socket.socket() as sock:
        assert backend(sock) == "mp"
        on_a_platform(monkeypatch, True)
        assert backend(sock, "mp") == "mp"


def test_a_worker_is_spawned_if_vllm_preloads_a_library_that_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_platform(monkeypatch, True)
    loaded = torch.__path__[0] + "/lib/libtorch_cpu.so"
    with socket.socket() as sock:
        monkeypatch.setenv("LD_PRELOAD", loaded)
        assert backend(sock) == "uni"
        monkeypatch.setenv("LD_PRELOAD", f"/usr/lib/libtcmalloc_minimal.so.4:{loaded}")
        assert backend(sock) == "mp"


class Chosen:
    """The cores that vLLM chooses for a worker."""

    def __init__(self, given: Any):
        self.skip_setup, self.cpu_lists = given.skip, [sorted(os.sched_getaffinity(0))[:1]]


def compute(told: Connection) -> None:
    sum_much()
    told.send((torch.get_num_threads(), len(os.sched_getaffinity(0))))


def sum_much() -> None:
    torch.ones(1 << 20).add_(1).sum()


def serve_and_fork(skip: bool, told: Connection) -> None:
    ompmultiprocessing.OMPProcessManager = Chosen  # type: ignore[misc]
    torch.set_num_threads(3)
    threads = forking.compute_on_one_thread()
    sum_much()
    given = Config(skip=skip)
    register_after_fork(given, lambda config: forking._compute(config, threads))
    multiprocessing.get_context("fork").Process(target=compute, args=(told,)).start()


@pytest.mark.parametrize("skip", [True, False])
def test_a_forked_worker_uses_as_many_threads_and_cores_as_a_spawned_worker(
    skip: bool,
) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    # A fork of this process, whose threads may have computed, would wait for these threads for ever.
    process = multiprocessing.get_context("forkserver").Process(target=serve_and_fork, args=(skip, there))
    process.start()
    assert here.poll(120), "it waits for threads that its parent had"
    assert here.recv() == ((3, len(os.sched_getaffinity(0))) if skip else (1, 1))
    process.join()
