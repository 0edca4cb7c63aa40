"""The server that tests fork processes from: there is one, and it imports what all of them say before it is first used."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path

TRACED = ("VLLM_CPU_CI_ENV", "1")
"""Lets vLLM's CPU build trace a model, as it does by default, but generate no C++ of it, which takes half a minute."""

_modules = ["__main__", "tests.interpreted"]


def preload(*modules: str) -> None:
    """Let the server import these modules, which spares every process from doing so."""
    _modules.extend(modules)
    multiprocessing.set_forkserver_preload([*_modules, "tests.frozen"])


def start_server() -> None:
    """Fork the server from this process, which has imported by now all that the tests import: vLLM alone takes 20 s.

    Must be called before this process starts threads that compute.
    """
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(executable: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Fork in place of `spawnv_passfds`: run the program that is the last argument, with none but these files open."""
    process = os.fork()
    if process == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            # Numbers stay taken: objects of this process close them later.
            for descriptor in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
                if descriptor not in {0, 1, 2, nothing, *passed}:
                    os.dup2(nothing, descriptor, inheritable=False)
            forkserver._forkserver._lock = threading.Lock()  # the parent's call holds the old one
            exec(arguments[-1])
        finally:
            os._exit(1)
    return process
