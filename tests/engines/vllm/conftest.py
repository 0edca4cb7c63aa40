"""Fixtures of real vLLM (its CPU build) with small random models. Many tests share an engine, which takes half a minute."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# By default vLLM binds each engine to a core, the same one for the engines of parallel test processes.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

if torch.cuda.is_available():
    # A forked process cannot use a GPU after this process has called its driver, as many libraries do.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
else:
    from tests.engines.vllm import forked  # noqa: F401


@pytest.fixture
def engine(case: tuple[Any, Any]) -> Any:
    """Return the engine of the file's fixture ``case``, cleared as if it had just been started."""
    from tests.engines.vllm.engines import clear

    clear(case[0])
    return case[0]


@pytest.fixture
def model(case: tuple[Any, Any]) -> Any:
    """Return the transformers model of the file's fixture ``case``."""
    return case[1]
