"""Starts `cacheblend` commands in processes forked from a server that has imported vLLM, to save the import."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.vllm.forked import EnvironedProcess
from tests.forking import preload

preload(
    __name__,
    "cacheblend_rag.cli",
    "cacheblend_rag.server.launch",
    "cacheblend_rag.server.renderer",
    "cacheblend_rag.server.routes",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.launcher",
)


def start(
    arguments: Sequence[str], log: Path, settings: Mapping[str, str], errors: Path | None = None
) -> EnvironedProcess:
    """Start ``cacheblend`` with these arguments, in a new session.

    The command's output is added to ``log``; stderr is added to ``errors``, if given.
    """
    process = EnvironedProcess(target=_run, args=(list(arguments), (log, errors or log), dict(settings)))
    process.start()
    return process


def _run(arguments: list[str], logs: tuple[Path, Path], settings: dict[str, str]) -> None:
    os.setsid()
    for descriptor, log in enumerate(logs, 1):
        with log.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ |= settings
    sys.argv = ["cacheblend", *arguments]
    from cacheblend_rag.cli import main

    main()
