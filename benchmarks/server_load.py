"""What one tenant can do to a server and to the others: slow connections, and registrations beyond its quota.

    python benchmarks/server_load.py connections --count 1000
    python benchmarks/server_load.py registrations --count 1000000

Each starts `cacheblend serve` with the bundled model and two tenants, measures how long the one answers (p99) and how much
memory its process has, lets the other one loose, and measures again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

MOST_CHUNKS, AT_ONCE = 100, 1000
KEYS = f"""
[[key]]
value = "loud"
role = "write"
tenant = "loud"

[[key]]
value = "quiet"
role = "write"
tenant = "quiet"

[[tenant]]
name = "loud"
max_chunks = {MOST_CHUNKS}
"""


class Server:
    """A running `cacheblend serve`."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        keys = folder / "keys.toml"
        keys.write_text(KEYS)
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
        """Resident memory of the process that speaks HTTP."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def p99_ms(client: httpx.AsyncClient, count: int) -> float:
    """How long all but the slowest hundredth of the quiet tenant's answers take."""
    took = []
    for number in range(count):
        begin = time.perf_counter()
        body = {"prompt": f"Question {number}: who?", "max_tokens": 4, "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        took.append(time.perf_counter() - begin)
    return 1e3 * sorted(took)[int(0.99 * len(took))]


async def compare(server: Server, requests: int, loud: Callable[[], Awaitable[str]]) -> None:
    """Measure the quiet tenant alone and beside the loud one; while that goes on, and at least as long as ``requests`` take."""
    async with server.client("quiet") as quiet:
        await p99_ms(quiet, 20)
        alone, before = await p99_ms(quiet, requests), server.megabytes()
        work = asyncio.ensure_future(loud())
        beside, most = [], before
        while not work.done() or not beside:
            beside.append(await p99_ms(quiet, requests))
            most = max(most, server.megabytes())
        said = await work
    print(said)
    print(f"p99 of the other tenant: {alone:.0f} ms alone, {max(beside):.0f} ms at most beside")
    print(f"memory: {before:.0f} MiB before, {most:.0f} MiB at most")


async def connections(server: Server, count: int, seconds: float) -> str:
    """Hold connections that send a byte of their headers, or of a body, every few seconds."""
    answered = 0

    async def slow(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/chunks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer loud\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head + (body if number % 2 else b"X-Slow: "))
        until = time.monotonic() + seconds
        while time.monotonic() < until and not reader.at_eof():
            writer.write(b" ")
            await asyncio.sleep(5)
        answered += bool(reader._buffer)  # type: ignore[attr-defined]
        writer.close()

    await asyncio.gather(*(slow(number) for number in range(count)), return_exceptions=True)
    return f"{count} slow connections for {seconds:g} s; {answered} of them were answered (408 after 60 s)"


async def fill(server: Server) -> None:
    """Register as many chunks as the loud tenant may have."""
    async with server.client("loud") as client:
        texts = [f"One of the first {number} texts." for number in range(MOST_CHUNKS)]
        (await client.post("/v1/chunks", json={"texts": texts})).raise_for_status()


async def registrations(server: Server, count: int) -> str:
    """Register texts, a thousand in a request, all of them new and beyond the quota."""
    begin, statuses = time.perf_counter(), dict[int, int]()
    async with server.client("loud") as client:
        for first in range(0, count, AT_ONCE):
            size = min(AT_ONCE, count - first)
            texts = [f"Text {first + number} of a tenant that does not stop." for number in range(size)]
            status = (await client.post("/v1/chunks", json={"texts": texts})).status_code
            statuses[status] = statuses.get(status, 0) + size
    return f"{count} registrations in {time.perf_counter() - begin:.0f} s: {statuses}"


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CACHEBLEND_HOME"] = folder
        server = Server(Path(folder))
        try:
            await server.started()
            yield server
        finally:
            server.process.terminate()
            server.process.wait()


async def run(options: argparse.Namespace) -> None:
    async with serving() as server:
        if options.what == "connections":
            await compare(server, options.requests, lambda: connections(server, options.count, options.seconds))
        else:
            await fill(server)
            await compare(server, options.requests, lambda: registrations(server, options.count))


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("connections", "registrations"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200, help="of the other tenant, for each p99")
    parser.add_argument("--seconds", type=float, default=70, help="how long connections are held")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
