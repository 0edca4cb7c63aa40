"""Tests the imports and the OpenMP settings that every command shares."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_help_imports_no_torch():
    code = (
        "import sys, typer; from cacheblend_rag.cli import app; "
        "assert len(list(typer.main.get_command(app).commands.values())) > 12; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_serve_prints_its_first_line_before_importing_torch() -> None:
    code = (
        "import sys; from cacheblend_rag.cli import app; import cacheblend_rag.server.options as options; "
        "options.tell = lambda _: sys.exit(5 + ('torch' in sys.modules)); app(['serve'])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 5


def test_a_command_imports_no_other_command():
    code = (
        "import sys; from cacheblend_rag.cli import app; app(['ask', '--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.startswith(('cacheblend_rag.cli.', 'cacheblend_lab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "cacheblend_rag.cli.ask" in loaded
    assert set(loaded) <= {f"cacheblend_rag.cli.{name}" for name in ("ask", "chat", "citations", "resident")}


def test_threads_of_a_command_do_not_spin_for_long() -> None:
    code = "from cacheblend_rag.cli import app; app(['ask', '--help'], standalone_mode=False); import torch"
    # vLLM preloads OpenMP into child processes: OpenMP would read the environment before the command sets it.
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD"}
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch is built with another OpenMP")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


def test_a_command_asks_for_huge_pages_unless_the_user_has_decided(run, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, asked in ((None, "1"), ("0", "0")):
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
        if given is not None:
            monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given)
        assert run("ask", "--help").exit_code == 0
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == asked


def test_a_users_omp_wait_policy_leaves_the_spin_count_unset(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert run("ask", "--help").exit_code == 0
    assert "GOMP_SPINCOUNT" not in os.environ
