"""Test vLLM's second model runner and its Triton attention without a GPU, with interpreted kernels (see `interpreter/`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = (HERE / "test_families.py", HERE / "triton_attention.py")
# An interpreted prompt takes seconds: the selection has one test for each difference between the runners.
WHAT = "worker_reports or gate or ratio_1 or qwen3-0.15 or static-query or behind_a_missing or never_serve_an_exact"


def test_blends_in_the_second_runner_are_exact_and_triton_attention_gets_the_exact_mask() -> None:
    path = [str(HERE / "interpreter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_CI_ENV": "1",
        "PYTHONPATH": ":".join(path),
    }
    # The tests run in another process, because vLLM looks for Triton when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, FILES), "-k", f"exact_mask or (qwen3 and ({WHAT}))"],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
