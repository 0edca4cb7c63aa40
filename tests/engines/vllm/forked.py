"""Makes vLLM start its processes from one that has imported it already: twenty seconds less for each engine.

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
    """Takes environment and folder of the process that starts it, as a spawned one would, not those of the server it is from."""

    def start(self) -> None:
        self._environ, self._folder = dict(os.environ), Path.cwd()
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._folder)
        tempfile.tempdir = None  # is found by the environment
        super().run()


class _Context(ForkServerContext):
    Process = EnvironedProcess


def _context() -> Any:
    # An engine's process has no threads yet when it starts its workers.
    return _Context() if process.parent_process() is None else multiprocessing.get_context("fork")


# A worker spins for a second behind each step, and two cores have other things to do; here it waits, as it does when idle.
# Then a notice of news is lost now and then, which vLLM makes up for after five seconds.
shm_broadcast.SpinCondition.__init__.__defaults__ = (0.001,)
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 10
# In the tests' process, and in the server that it forks from; where another test has imported vLLM's engine by now, too.
_own = system_utils.get_mp_context
for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
    if vars(module).get("get_mp_context") is _own:
        module.get_mp_context = _context
# What a model's class can do vLLM asks of a process that imports everything first, so that its own touches no GPU yet.
registry._run_in_subprocess = lambda question: question()
# vLLM's own one-liners, which it compiles in each process at their first call, for two seconds; whoever imports them follows.
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
