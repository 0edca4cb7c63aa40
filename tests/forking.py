"""Starts the one server that tests fork processes from, with the imports that all of these processes need."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path

TRACED = ("VLLM_CPU_CI_ENV", "1")
"""Lets vLLM's CPU build trace a model, as by default, without generating C++, which takes half a minute."""

_modules = ["__main__", "tests.interpreted"]


def preload(*modules: str) -> None:
    """Let the server import these modules, so that its processes need not import them."""
    _modules.extend(modules)
    multiprocessing.set_forkserver_preload([*_modules, "tests.frozen"])


def start_server() -> None:
    """Fork the server from this process, which has already imported the tests' imports: vLLM alone takes 20 s.

    Call this function before the process starts threads that compute.
    """
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(executable: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Fork in place of `spawnv_passfds`: run the program in the last argument with only the passed files open."""
    process = os.fork()
    if process == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            # The numbers stay taken, since objects of this process close them later.
            for descriptor in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
                if descriptor not in {0, 1, 2, nothing, *passed}:
                    os.dup2(nothing, descriptor, inheritable=False)
            forkserver._forkserver._lock = threading.Lock()  # the parent's call holds the old one
            exec(arguments[-1])
        finally:
            os._exit(1)
    return process
