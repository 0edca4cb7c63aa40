"""Tests that the kernels compile for Ampere, Hopper and Blackwell, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_for_a_gpu_use_tensor_cores_and_fit_shared_memory(capability: int, tmp_path: Path) -> None:
    """Compile in another process, because Triton may interpret in this one."""
    pytest.importorskip("triton", reason="Triton is not installed; on Linux, make setup installs it")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_for.py")
    done = subprocess.run(
        [sys.executable, script, str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
