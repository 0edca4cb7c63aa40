"""Tests stopping, killing and restarting a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engines.contract import TEXTS
from tests.server.running import RunningServer

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
pytestmark = pytest.mark.slow

PROMPT = "\n\n".join([*TEXTS, "Question: Who?"])


def ask(server: RunningServer, **blend: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "cacheblend": blend}
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sigterm_lets_streams_end_and_a_restart_knows_the_chunks(server_model: Path, tmp_path: Path) -> None:
    with RunningServer(server_model, tmp_path / "store") as server:
        ids = [c["id"] for c in server.post("/v1/chunks", {"texts": TEXTS}).json()["data"]]
        want = ask(server, quality="full")["choices"][0]["token_ids"]
        fields = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        fields |= {"stream_options": {"include_usage": True}}
        lines: list[str] = []
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=fields, headers=server.headers, timeout=600
        ) as answer:
            arriving = answer.iter_lines()
            lines.append(next(arriving))
            stopped = threading.Thread(target=server.stop)
            stopped.start()
            lines += arriving
        stopped.join()
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert pieces[-1]["usage"]["completion_tokens"] == 200
        assert server.process is not None
        assert server.process.exitcode == 0
    # The next server on this store is killed while it precomputes.
    many = [
        f"Entry {i}: the {word} of the harbour was counted again, and found to be {i * 7}."
        for i in range(30)
        for word in ("ships", "men")
    ]
    with RunningServer(server_model, tmp_path / "store") as server:
        assert server.get("/v1/chunks/stats").json()["chunks"] == len(ids)
        blended = ask(server, ratio=1.0)
        assert blended["usage"]["cacheblend"]["mode"] == "blend"
        assert blended["choices"][0]["token_ids"] == want

        def precompute() -> None:
            with pytest.raises(httpx.TransportError):
                server.post("/v1/chunks", {"texts": many})

        thread = threading.Thread(target=precompute)
        thread.start()
        while server.get("/v1/chunks/stats").json()["kv"]["entries"] < len(ids) + 5:
            pass
        server.kill()
        thread.join()
    with RunningServer(server_model, tmp_path / "store") as server:
        assert server.get("/v1/chunks/stats").json()["chunks"] == len(ids)
        report = server.post("/v1/chunks", {"texts": many}).json()["report"]
        assert report["present"] > 0
        assert report["present"] + report["computed"] == len(many)
        assert ask(server, ratio=1.0)["choices"][0]["token_ids"] == want


def test_sigterm_during_a_registration_leaves_no_unregistered_kv(server_model: Path, tmp_path: Path) -> None:
    many = [f"Entry {i}: the ships of the harbour were {i * 7}." for i in range(2500)]
    with RunningServer(server_model, tmp_path / "store", "--shutdown-timeout", "1") as server:
        server.post("/v1/chunks", {"texts": TEXTS}).raise_for_status()

        def precompute() -> None:
            with suppress(httpx.TransportError):  # the answer may be an error, or the connection may end
                assert server.post("/v1/chunks", {"texts": many}).is_error

        thread = threading.Thread(target=precompute)
        thread.start()
        while thread.is_alive() and server.get("/v1/chunks/stats").json()["kv"]["entries"] < 100:
            pass
        assert server.stop() == 0
        thread.join()
    assert len(list((tmp_path / "store" / "kv").rglob("*.safetensors"))) == len(TEXTS) + 1  # and the header's entry


def test_serve_logs_its_address_and_stops_at_sigterm(server_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cacheblend_rag", "serve", "--model", str(server_model), "--port", "0"]
    command += ["--store", str(tmp_path / "store"), "--enforce-eager", "--kv-memory", "64MiB", "--max-model-len", "512"]
    settings = {"CACHEBLEND_HOME": str(tmp_path / "home"), "VLLM_LOGGING_LEVEL": "INFO"}
    env = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"} | settings
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Serving" in line:
                break
        assert f"Serving {server_model}" in said[-1], "".join(said)
        assert re.search(r"on http://127.0.0.1:\d+: 0 chunks known", said[-1])
        # The engine computes in its own process: a worker process would import vLLM once more.
        (engine,) = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        left = process.stdout.read()
    assert process.returncode == 0, left
    assert "leaked" not in left  # Triton reports its own leaks at the interpreter's end
    assert not engine.is_running()


def test_two_tensor_parallel_ranks_blend_and_delete_chunks(server_model: Path, tmp_path: Path) -> None:
    with RunningServer(server_model, tmp_path / "store", "--tensor-parallel-size", "2") as server:
        assert ask(server)["usage"]["cacheblend"]["reason"] == "no known chunk in the prompt"
        want = ask(server, quality="full")["choices"][0]["token_ids"]
        ids = [c["id"] for c in server.post("/v1/chunks", {"texts": TEXTS}).json()["data"]]
        blended = ask(server, ratio=1.0)
        assert blended["usage"]["cacheblend"]["mode"] == "blend"
        assert blended["choices"][0]["token_ids"] == want
        assert server.get(f"/v1/chunks/{ids[0]}").json()["stored"]
        server.request("DELETE", f"/v1/chunks?id={ids[0]}").raise_for_status()
        entries = server.get("/v1/chunks/stats").json()["kv"]["entries"]
        assert entries == 2 * (len(ids) - 1 + 1)  # and the header's entries
