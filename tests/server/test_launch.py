"""How the processes of a server come to be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from argparse import Namespace
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm import platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry

from cacheblend_rag.server import launch

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def look_at(sock: socket.socket, told: Connection) -> None:
    told.send((sock.fileno(), signal.set_wakeup_fd(-1), os.environ[METHOD]))


@pytest.fixture(params=[True, False])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv(METHOD, "spawn")
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: request.param))
    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", lambda self: "vLLM's")
    monkeypatch.setattr(AsyncEngineArgs, "from_cli_args", classmethod(lambda cls, args: cls.__new__(cls)))
    monkeypatch.setattr(entry, "build_async_engine_client_from_engine_args", lambda arguments: arguments)
    return request.param


def test_on_a_cpu_the_engine_is_forked_and_holds_neither_the_address_nor_the_loops_signals(cpu: bool) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    loop, waked = socket.socketpair()
    waked.setblocking(False)
    with socket.socket() as sock, loop, waked:
        assert launch._engine(Namespace(), sock).create_engine_config() == "vLLM's"
        if not cpu:  # what is forked could not use a GPU that is in use
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
