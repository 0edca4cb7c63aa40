"""A `cacheblend serve` whose vLLM cannot start says so on one screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
pytestmark = pytest.mark.slow


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory for temporary files whose path leaves room for those of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def serve(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "cacheblend_rag",
        "serve",
        "--store",
        str(tmp_path / "store"),
        "--port",
        "0",
        *flags,
    ]
    env = {**os.environ, "CACHEBLEND_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # other tests of this process set it, and vLLM lets it decide
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"serve neither starts nor ends; it wrote {late.stdout!r} and {late.stderr!r}")


def test_a_kv_cache_too_small_for_a_prompt_is_told_with_what_to_do(short: Path) -> None:
    done = serve(short, "--kv-memory", "4MiB", "--enforce-eager")
    said = done.stderr[done.stderr.index("Error: ") :]
    assert done.returncode == 4
    assert "Traceback" not in done.stdout + done.stderr
    assert "vLLM does not start" in said
    assert "--kv-memory" in said
    assert "--max-model-len" in said
    assert len(said.splitlines()) <= 12
    (log,) = re.findall(r"whole log is in (\S+);", said)
    assert "Traceback (most recent call last)" in Path(log).read_text(encoding="utf-8")


def test_a_prompt_longer_than_the_model_takes_is_told_with_what_to_do(tmp_path: Path) -> None:
    done = serve(tmp_path, "--max-model-len", "9999999")
    assert done.returncode == 4
    assert "greater than the derived max_model_len" in done.stderr
    assert "Give a smaller --max-model-len." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr[done.stderr.index("Error: ") :].splitlines()) <= 12


def test_temporary_files_in_too_deep_a_directory_are_told_with_what_to_do(short: Path) -> None:
    deep = short / ("d" * 90)
    deep.mkdir()
    done = serve(deep, "--enforce-eager")
    assert done.returncode == 4
    assert "Set TMPDIR to a directory with a shorter path." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
