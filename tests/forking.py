"""The server that tests fork processes from: there is one, and it imports what all of them say before it is first used."""

from __future__ import annotations

import multiprocessing

TRACED = ("VLLM_CPU_CI_ENV", "1")
"""Lets vLLM's CPU build trace a model, as it does by default, but generate no C++ of it, which takes half a minute."""

_modules = ["__main__", "tests.interpreted"]


def preload(*modules: str) -> None:
    """Let the server import these modules, which spares every process from doing so."""
    _modules.extend(modules)
    multiprocessing.set_forkserver_preload([*_modules, "tests.frozen"])
