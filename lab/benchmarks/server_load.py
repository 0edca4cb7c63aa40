"""Measures a tenant's effect on a server and its tenants: slow connections, registrations beyond a quota, many answers.

    python lab/benchmarks/server_load.py connections --count 1000
    python lab/benchmarks/server_load.py registrations --count 1000000
    python lab/benchmarks/server_load.py answers --count 8

Each command starts `cacheblend serve` with the bundled model and several tenants, and measures the quiet tenant's p99
latency and the server process's memory: alone; while a loud tenant sends its requests to a bare process that refuses
all requests, as a baseline, since clients and server share the machine's cores; and while the loud tenant sends them to
the server.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.process
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn

MOST_CHUNKS, AT_ONCE, MOST_ANSWERS = 100, 1000, 2
KEYS = f"""
[[key]]
value = "loud"
role = "write"
tenant = "loud"

[[key]]
value = "quiet"
role = "write"
tenant = "quiet"

[[key]]
value = "asking"
role = "ask"
tenant = "asking"

[[tenant]]
name = "loud"
max_chunks = {MOST_CHUNKS}

[[tenant]]
name = "asking"
max_concurrent = {MOST_ANSWERS}
tokens_per_minute = {{tokens}}
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until a process listens on the port; raise SystemExit after about a minute."""
    for _ in range(600):
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise SystemExit(f"Nobody listens to port {port}.")


class Server:
    """Runs `cacheblend serve` in a separate process."""

    def __init__(self, folder: Path, tokens_per_minute: int):
        self.port = free_port()
        keys = folder / "keys.toml"
        keys.write_text(KEYS.format(tokens=tokens_per_minute))
        command = [
            sys.executable,
            "-m",
            "cacheblend_rag",
            "serve",
            "--store",
            str(folder / "store"),
            "--keys",
            str(keys),
        ]
        command += ["--port", str(self.port), "--enforce-eager", "--kv-memory", "64MiB", "--max-model-len", "1024"]
        command += ["--disable-uvicorn-access-log"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self, tenant: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {tenant}"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=120)

    async def started(self) -> None:
        async with self.client("quiet") as client:
            while self.process.poll() is None:
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.5)
        raise SystemExit("The server did not start.")

    def megabytes(self) -> float:
        """Return the resident memory of the HTTP process, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def ask(client: httpx.AsyncClient, count: int) -> list[float]:
    """Ask ``count`` questions and return the milliseconds that each answer took."""
    took = []
    for number in range(count):
        begin = time.perf_counter()
        body = {"prompt": f"Question {number}: who?", "max_tokens": 4, "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        took.append(1e3 * (time.perf_counter() - begin))
    return took


def p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * len(took))]


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Read a request and answer 507; an ASGI application with the least possible work."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 507, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})


def refuse_all(port: int) -> None:
    uvicorn.run(refuse, host="127.0.0.1", port=port, log_level="error")


@contextmanager
def apart(work: Callable[..., object], *arguments: object) -> Iterator[multiprocessing.process.BaseProcess]:
    """Run ``work`` in a separate process, so that it takes no time from the measured client."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


async def beside(server: Server, process: multiprocessing.process.BaseProcess) -> tuple[float, float]:
    """Return the quiet tenant's p99 in milliseconds, and the server's peak memory in MiB, while ``process`` runs."""
    took, most = list[float](), 0.0
    async with server.client("quiet") as quiet:
        while process.is_alive() or not took:
            took += await ask(quiet, 10)
            most = max(most, server.megabytes())
    return p99(took), most


async def compare(server: Server, requests: int, loud: Callable[..., None], count: int, seconds: float) -> None:
    """Measure the quiet tenant alone, then beside loud requests to a refusing process, then to the server."""
    async with server.client("quiet") as quiet:
        await ask(quiet, 20)
        alone, before = p99(await ask(quiet, requests)), server.megabytes()
    port = free_port()
    with apart(refuse_all, port):
        wait_for(port)
        with apart(loud, port, count, seconds, "elsewhere") as process:
            elsewhere, _ = await beside(server, process)
    with apart(loud, server.port, count, seconds, "here") as process:
        here, most = await beside(server, process)
    print(f"p99 of the other tenant: {alone:.0f} ms alone, {elsewhere:.0f} ms beside a process that refuses the same")
    print(f"requests, {here:.0f} ms beside what it makes this server do")
    print(f"memory: {before:.0f} MiB before, {most:.0f} MiB at most")


def connections(port: int, count: int, seconds: float, where: str) -> None:
    """Hold ``count`` connections that send a byte of their headers, or of a body, every few seconds."""

    async def slow(number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chunks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer loud\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head + (body if number % 2 else b"X-Slow: "))
        until = time.monotonic() + seconds
        answer = asyncio.ensure_future(reader.read(12))
        try:
            while time.monotonic() < until and not answer.done():
                writer.write(b" ")
                await asyncio.wait([answer], timeout=5)
            return (await answer).decode().partition(" ")[2] or "closed" if answer.done() else "open"
        except ConnectionError:
            return "closed"
        finally:
            answer.cancel()
            writer.close()

    async def hold() -> None:
        ends = Counter(await asyncio.gather(*(slow(number) for number in range(count))))
        print(f"{where}: {count} slow connections for {seconds:g} s; at their end: {dict(ends)}", flush=True)

    asyncio.run(hold())


async def fill(server: Server) -> None:
    """Register as many chunks as the loud tenant's quota allows."""
    async with server.client("loud") as client:
        texts = [f"One of the first {number} texts." for number in range(MOST_CHUNKS)]
        (await client.post("/v1/chunks", json={"texts": texts})).raise_for_status()


def registrations(port: int, count: int, seconds: float, where: str) -> None:
    """Register ``count`` new texts beyond the quota, a thousand per request."""

    async def register() -> None:
        begin, statuses = time.perf_counter(), Counter[int]()
        headers = {"Authorization": "Bearer loud"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
            for first in range(0, count, AT_ONCE):
                size = min(AT_ONCE, count - first)
                texts = [f"Text {first + number} of a tenant that does not stop." for number in range(size)]
                statuses[(await client.post("/v1/chunks", json={"texts": texts})).status_code] += size
        took = time.perf_counter() - begin
        print(f"{where}: {count} registrations in {took:.0f} s, by status: {dict(statuses)}", flush=True)

    asyncio.run(register())


def answers(port: int, count: int, seconds: float, where: str) -> None:
    """Ask from ``count`` clients for the number and length of answers that a tenant may have, and for more."""
    kinds: list[dict[str, Any]] = [
        {"n": MOST_ANSWERS, "max_tokens": 50},  # longer answers would occupy all places and block the other kinds
        {"n": 4000, "max_tokens": 500},
        {"prompt": ["Who?"] * MOST_ANSWERS, "max_tokens": 50, "ignore_eos": True},
        {"prompt": "Who was it then? " * 100, "prompt_logprobs": 1, "max_tokens": 1},
        {"n": MOST_ANSWERS, "max_tokens": 100, "use_beam_search": True},
        {"prompt": "Who was it then? " * 190, "max_tokens": 1},
    ]

    async def ask_on(number: int, until: float) -> Counter[int]:
        statuses = Counter[int]()
        headers = {"Authorization": "Bearer asking"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=None) as client:
            while time.monotonic() < until:
                number += 1
                body = {"prompt": "Who?", **kinds[number % len(kinds)]}
                statuses[(answer := await client.post("/v1/completions", json=body)).status_code] += 1
                if answer.status_code != 200:
                    await asyncio.sleep(0.1)
        return statuses

    async def ask_all() -> None:
        until = time.monotonic() + seconds
        found = await asyncio.gather(*(ask_on(number, until) for number in range(count)))
        print(f"{where}: {count} clients for {seconds:g} s, by status: {dict(sum(found, Counter()))}", flush=True)

    asyncio.run(ask_all())


@asynccontextmanager
async def serving(tokens_per_minute: int) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CACHEBLEND_HOME"] = folder
        server = Server(Path(folder), tokens_per_minute)
        try:
            await server.started()
            yield server
        finally:
            server.process.terminate()
            server.process.wait()


async def run(options: argparse.Namespace) -> None:
    async with serving(options.tokens_per_minute) as server:
        if options.what == "registrations":
            await fill(server)
        loud = {"connections": connections, "registrations": registrations, "answers": answers}[options.what]
        await compare(server, options.requests, loud, options.count, options.seconds)


def main() -> None:
    """Read the options and run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("connections", "registrations", "answers"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000, help="of the other tenant alone")
    parser.add_argument("--seconds", type=float, default=70, help="how long connections are held, or answers asked for")
    parser.add_argument("--tokens-per-minute", type=int, default=10_000, help="that a tenant who asks may have")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
