"""Real vLLM (its CPU build) with small random models. One engine for many tests: starting one takes half a minute."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Bound to a core, as it is by default, each engine would have the same one as that of the test process beside it.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

if torch.cuda.is_available():
    # What is forked cannot use a GPU that this process has asked for anything, as many libraries do.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
else:
    from tests.engines.vllm import forked  # noqa: F401


@pytest.fixture
def engine(case: tuple[Any, Any]) -> Any:
    """The engine of a file's case, as if it had just been started; ``case`` is a file's own."""
    from tests.engines.vllm.engines import clear

    clear(case[0])
    return case[0]


@pytest.fixture
def model(case: tuple[Any, Any]) -> Any:
    """The model of a file's case on transformers."""
    return case[1]
