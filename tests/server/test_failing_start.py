"""Tests that `cacheblend serve` reports a failed start of vLLM on one screen."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from tests.server import forked

pytestmark = pytest.mark.slow


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@dataclass(frozen=True)
class Ended:
    """The output and the exit code of a command."""

    returncode: int
    stdout: str
    stderr: str


def serve(tmp_path: Path, model: Path, *flags: str) -> Ended:
    out, errors = tmp_path / "stdout", tmp_path / "stderr"
    settings = {"CACHEBLEND_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        # Other tests of this process set VLLM_CPU_KVCACHE_SPACE, every run sets VLLM_RPC_BASE_PATH; vLLM reads both.
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        patch.delenv("VLLM_RPC_BASE_PATH")
        process = forked.start(
            ["serve", "--model", str(model), "--store", str(tmp_path / "store"), "--port", "0", *flags],
            out,
            settings,
            errors,
        )
    process.join(600)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"serve neither starts nor ends; it wrote {out.read_text()!r} and {errors.read_text()!r}")
    return Ended(process.exitcode, out.read_text("utf-8"), errors.read_text("utf-8"))


def test_a_kv_cache_too_small_for_a_prompt_is_reported_with_a_remedy(short: Path, server_model: Path) -> None:
    done = serve(short, server_model, "--kv-memory", "1MiB", "--enforce-eager")
    said = done.stderr[done.stderr.index("Error: ") :]
    assert done.returncode == 4
    assert "Traceback" not in done.stdout + done.stderr
    assert "vLLM does not start" in said
    assert "--kv-memory" in said
    assert "--max-model-len" in said
    assert len(said.splitlines()) <= 12
    (log,) = re.findall(r"whole log is in (\S+);", said)
    assert "Traceback (most recent call last)" in Path(log).read_text(encoding="utf-8")


def test_a_context_window_too_long_for_the_model_is_reported_with_a_remedy(tmp_path: Path, server_model: Path) -> None:
    done = serve(tmp_path, server_model, "--max-model-len", "9999999")
    assert done.returncode == 4
    assert "greater than the derived max_model_len" in done.stderr
    assert "Give a smaller --max-model-len." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr[done.stderr.index("Error: ") :].splitlines()) <= 12


def test_a_temporary_directory_with_too_long_a_path_is_reported_with_a_remedy(short: Path, server_model: Path) -> None:
    deep = short / ("d" * 90)
    deep.mkdir()
    done = serve(deep, server_model, "--enforce-eager")
    assert done.returncode == 4
    assert "Set TMPDIR to a directory with a shorter path." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
