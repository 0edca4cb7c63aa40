"""Opens the engine that both packages' tests run on: transformers, vLLM or a server, by ``CACHEBLEND_TEST_ENGINE``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory

import httpx

from cacheblend_rag import BlendEngine, RemoteEngine, TransformersEngine


@contextmanager
def engine_of(model: str | None = None) -> Iterator[BlendEngine]:
    """Open a model, by default the bundled one: on "transformers" (the default), on "vllm", or on a "server" of its own."""
    where = os.environ.get("CACHEBLEND_TEST_ENGINE", "transformers")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with ExitStack() as opened:
        if where == "server":
            made: BlendEngine = RemoteEngine(opened.enter_context(_served(model)))
        elif where == "vllm":
            from cacheblend_rag import VLLMEngine

            made = VLLMEngine(model, enforce_eager=True)
        else:
            assert where == "transformers", where
            made = TransformersEngine(model, device="cpu")
        yield opened.enter_context(made)


@contextmanager
def _served(model: str | None) -> Iterator[str]:
    """Start a server on a new store; return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with TemporaryDirectory() as store:
        flags = ["--store", store, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        flags += ["--model", model] if model else []
        with subprocess.Popen([sys.executable, "-m", "cacheblend_rag", "serve", *flags]) as server:
            try:
                while not _healthy(address):
                    with suppress(subprocess.TimeoutExpired):
                        raise RuntimeError(f"The server ended with {server.wait(1)}.")
                yield address
            finally:
                server.terminate()


def _healthy(address: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{address}/health").is_success
    return False
