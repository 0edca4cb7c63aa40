"""Tests what every command shares: nothing heavy is imported for the help, and an error has no traceback."""

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


def test_a_command_imports_no_other_command():
    code = (
        "import sys; from cacheblend_rag.cli import app; app(['ask', '--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.startswith(('cacheblend_rag.cli.', 'cacheblend_rag.lab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "cacheblend_rag.cli.ask" in loaded
    assert set(loaded) <= {f"cacheblend_rag.cli.{name}" for name in ("ask", "chat", "citations", "explain")}


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")],
)
def test_threads_of_a_command_do_not_spin_for_long_unless_a_user_says_so(chosen: dict[str, str], spins: str) -> None:
    code = "from cacheblend_rag.cli import app; app(['ask', '--help'], standalone_mode=False); import torch"
    # vLLM preloads OpenMP into what this process starts: it would be read before the command says anything.
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LD_PRELOAD"}
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"OMP_DISPLAY_ENV": "VERBOSE", **chosen}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch is built with another OpenMP")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_an_unexpected_error_says_so_without_a_traceback():
    code = (
        "import cacheblend_rag.lab.bench as b, sys; from cacheblend_rag.cli import main\n"
        "def broken(*a): raise ZeroDivisionError('boom')\n"
        "b.bench_index = broken; sys.argv = ['cacheblend', 'bench', 'index', '--random-weights', 'llama:2x256']; main()"
    )
    env = {k: v for k, v in os.environ.items() if k != "CACHEBLEND_DEBUG"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 70
    assert "unexpected ZeroDivisionError: boom" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
