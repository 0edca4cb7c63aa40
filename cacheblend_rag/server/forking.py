"""Forks vLLM's engine from the server's process on a CPU: the fork spares the engine, and a worker, the imports of vLLM."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from multiprocessing.util import register_after_fork
from typing import Any

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def compute_on_one_thread() -> int:
    """Limit torch to one thread on a CPU: threads do not survive a fork, and a forked process would wait for them forever.

    Returns:
        Number of threads that torch used before.
    """
    import torch
    from vllm.platforms import current_platform

    threads = torch.get_num_threads()
    if current_platform.is_cpu():
        torch.set_num_threads(1)
    return threads


def forked_engine(args: Namespace, sock: socket.socket, threads: int) -> Any:
    """Return the context manager that starts vLLM's engine; on a CPU its process is forked and need not import vLLM again.

    A single worker computes in the engine's process, on ``threads`` threads unless vLLM has chosen cores. Several workers are
    spawned as usual.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
    from vllm.platforms import current_platform

    class Arguments(AsyncEngineArgs):
        def create_engine_config(self, *given: Any, **named: Any) -> Any:
            config = super().create_engine_config(*given, **named)
            if current_platform.is_cpu() and sys.platform == "linux":
                register_after_fork(sock, _leave_to_parent)
                os.environ[_START_METHOD] = "fork"  # vLLM has just set another method for all processes
                if self.distributed_executor_backend is None and _can_compute(config.parallel_config):
                    config.parallel_config.distributed_executor_backend = "uni"  # vLLM would choose "mp"
                    register_after_fork(config, partial(_compute, threads=threads))
            return config

    return build_async_engine_client_from_engine_args(Arguments.from_cli_args(args))


def _leave_to_parent(sock: socket.socket) -> None:
    """Release, in a forked process, the parent's socket and signal file descriptor; further processes are spawned."""
    sock.close()
    signal.set_wakeup_fd(-1)
    os.environ[_START_METHOD] = "spawn"


def _can_compute(parallel: Any) -> bool:
    """Return whether a process forked from this one can be the only worker: its LD_PRELOAD libraries must be loaded here."""
    try:
        for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
            ctypes.CDLL(library, os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return (
        parallel.world_size == 1 and not parallel.numa_bind and find_spec("vllm.utils.ompmultiprocessing") is not None
    )


def _compute(config: Any, threads: int) -> None:
    """Apply, in a forked process, the settings of threads and cores that a spawned worker gets from vLLM's environment."""
    import torch
    import torch._inductor.config
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    chosen = OMPProcessManager(config)
    if not chosen.skip_setup:
        os.sched_setaffinity(0, chosen.cpu_lists[0])
        threads = len(chosen.cpu_lists[0])
        os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.dynamic_threads = True
