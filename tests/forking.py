"""Starts the one server that tests fork processes from, with the imports that all of these processes need."""

from __future__ import annotations

import multiprocessing

TRACED = ("VLLM_CPU_CI_ENV", "1")
"""Lets vLLM's CPU build trace a model, as by default, without generating C++, which takes half a minute."""

_modules = ["__main__", "tests.interpreted"]


def preload(*modules: str) -> None:
    """Let the server import these modules, so that its processes need not import them."""
    _modules.extend(modules)
    multiprocessing.set_forkserver_preload([*_modules, "tests.frozen"])
