"""Make vLLM fork its processes from a server that has imported vLLM, which saves twenty seconds for each engine.

vLLM's CPU build spawns its processes, and each of them imports PyTorch and vLLM anew.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import process
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.models import registry
from vllm.utils import system_utils
from vllm.v1.sample.ops import logprobs

from tests.forking import preload


class EnvironedProcess(ForkServerProcess):
    """A process with the environment and folder of the process that starts it, as a spawned one, not of the fork server."""

    def start(self) -> None:
        self._environ, self._folder = dict(os.environ), Path.cwd()
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._folder)
        tempfile.tempdir = None  # tempfile reads it from the environment again
        super().run()


class _Context(ForkServerContext):
    Process = EnvironedProcess


def _context() -> Any:
    # An engine's process has no threads yet when it starts its workers.
    return _Context() if process.parent_process() is None else multiprocessing.get_context("fork")


# A worker spins for a second behind each step, which two cores cannot spare; here it waits, as it does when idle.
# Waiting sometimes misses a notification; vLLM checks again after five seconds, and here after 10 ms.
shm_broadcast.SpinCondition.__init__.__defaults__ = (0.001,)
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 10
# The patch covers the tests' process and the fork server, also if another test has imported vLLM's engine before.
_own = system_utils.get_mp_context
for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
    if vars(module).get("get_mp_context") is _own:
        module.get_mp_context = _context
# vLLM inspects a model's class in a process that imports everything first, so that its main process touches no GPU yet.
registry._run_in_subprocess = lambda question: question()
# vLLM compiles two small functions in each process at their first call, for two seconds; here they run uncompiled.
for module, name in ((logprobs, "batched_count_greater_than"), (vocab_parallel_embedding, "get_masked_input_and_mask")):
    compiled = getattr(module, name)
    setattr(module, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))
preload(
    __name__,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "tests.engines.vllm.overridden",
)
