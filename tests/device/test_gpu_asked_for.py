"""What is asked to run on a GPU does not pass for want of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_of_a_gpu_fail_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/device/test_waits.py", "-p", "no:cacheprovider"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "need a CUDA device" in done.stderr
