"""Runs `cacheblend serve` in a separate process, on the real vLLM."""

from __future__ import annotations

import os
import signal
import ssl
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import free_port
from tests.server import forked
from tests.server.collector import Collector

KEY = "the-key-of-the-tests"
BODY_LIMIT = 200_000
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Spares single requests from reading the system's certificates, which takes longer than the answer."""


class RunningServer:
    """Starts the server on entering and stops it on leaving.

    Attributes:
        url: The server's address, without ``/v1``.
        store: The store directory.
        home: The directory of the user's files.
        collector: The collector of the server's spans, or None.
        settings: Additional environment variables, read at the start.
    """

    def __init__(self, model: Path | None, store: Path, *flags: str, key: str | None = KEY):
        port = free_port()
        self.home = store.parent / "home"
        self.url, self.store, self._log = f"http://127.0.0.1:{port}", store, store.parent / f"log-{port}"
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._command = ["serve", "--store", str(store), "--ram-budget", "0"]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024"]
        self._command += ["--max-request-size", f"{BODY_LIMIT}B", *flags]
        if (
            model and "--ratio" not in flags
        ):  # a blend of so small a model saves no time: a given ratio blends every prompt
            self._command += ["--ratio", "0.5"]
        self.settings: dict[str, str] = {}
        self._command += (["--model", str(model)] if model else []) + (["--api-key", key] if key else [])
        self.process: BaseProcess | None = None
        self.collector: Collector | None = None

    def __enter__(self) -> RunningServer:
        settings = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all servers and engines on this machine share one core
            "VLLM_LOGGING_LEVEL": "INFO",  # an engine in this process may have set another level
            "VLLM_SERVER_DEV_MODE": "1",  # enables /reset_prefix_cache
            "CACHEBLEND_HOME": str(self.home),
            **self.settings,
        }
        self.process = forked.start(self._command, self._log, settings)
        deadline = time.monotonic() + 300
        while not self.healthy():
            if self.process.exitcode is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"The server did not start:\n{self.log()[-6000:]}")
            time.sleep(0.5)
        return self

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, verify=NO_TLS).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {**self.headers, **arguments.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=600, verify=NO_TLS, **arguments)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = (s for family in families for s in family.samples if s.name == f"cacheblend_{name}")
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def clear(self) -> None:
        """Bring the server into the state of a fresh start on an empty store."""
        self.post("/v1/chunks/flush", None)
        self.request("DELETE", "/v1/chunks?all=true").raise_for_status()
        for file in (self.store / "kv").rglob("*.safetensors"):
            file.unlink(missing_ok=True)
        assert self.post("/reset_prefix_cache", None).json()["success"]

    def stop(self) -> int:
        """Stop the server; return its exit code."""
        assert self.process is not None
        self.process.terminate()
        self.process.join(120)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"The server did not stop:\n{self.log()[-6000:]}")
        return self.process.exitcode

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        if self.process.exitcode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()

    def __exit__(self, *exc: object) -> None:
        assert self.process is not None
        if self.process.exitcode is None:
            self.stop()
