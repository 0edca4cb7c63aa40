"""Tests the start, the idle time and the end of the page."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gradio", reason="Gradio is not installed; make setup installs it")

from cacheblend_rag.ui.workspace import Choices
from tests.conftest import free_port
from tests.ui.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

COMMAND = """
import sys, cacheblend_rag.cli, cacheblend_rag.ui.launch
print("gradio" in sys.modules, "torch" in sys.modules)
import cacheblend_rag.ui.page
print("torch" in sys.modules, flush=True)
cacheblend_rag.cli.main()
"""
"""Runs `cacheblend`, and prints beforehand whether gradio and torch are imported."""


def test_the_page_starts_without_torch_and_ctrl_c_ends_it_with_exit_code_130(tmp_path: Path) -> None:
    port = free_port()
    options = [
        "--no-browser",
        "--port",
        str(port),
        "--store",
        str(tmp_path / "store"),
        "--server",
        "http://127.0.0.1:1",
    ]
    # Background jobs of a shell ignore SIGINT, and a page started by a test run in the background would ignore it too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    page = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "ui", *options],
        env={**os.environ, "CACHEBLEND_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while page.poll() is None:
            try:
                httpx.get(f"http://127.0.0.1:{port}/", timeout=60).raise_for_status()
                break
            except httpx.TransportError:
                threading.Event().wait(0.1)
        page.send_signal(signal.SIGINT)
        imported, said = page.communicate(timeout=300)
    finally:
        page.kill()
        signal.signal(signal.SIGINT, before)
    assert page.returncode == 130, said
    assert imported.startswith("False False\nFalse\n")
    assert "Stopped." in said and "Traceback" not in said
    assert not list(tmp_path.glob("cacheblend-ui-*"))  # uploaded files are deleted


def test_an_idle_page_polls_its_queue_at_most_20_times_a_second(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    looked, sleep = threading.Event(), asyncio.sleep

    async def noted(seconds: float, *given: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "gradio.queueing":
            waits.append(seconds)
            looked.set() if len(waits) > 3 else None
        return await sleep(seconds, *given)

    monkeypatch.setattr(asyncio, "sleep", noted)
    serve(Choices(lambda _: ScriptedEngine(), lambda: tmp_path / "store", lambda *_: ""))
    assert looked.wait(300)
    assert min(waits) >= 0.05
