"""Tests that good and bad requests leave no memory behind once they are answered and their chunks are deleted."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from random import Random
from resource import getpagesize

import httpx
import pytest

from tests.fuzz import FACTOR
from tests.server.test_routes import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FACTOR, reason="make fuzz: what is kept once is only told from what grows in many requests"),
]

JSON = {"content-type": "application/json"}
ROUND = 250 * FACTOR
ALLOWED_BYTES = 8 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def body(draw: Random, number: int) -> bytes:
    text = f"Note {number}: " + "".join(chr(draw.randrange(32, 0x2FFF)) for _ in range(draw.randrange(200)))
    good = ({"texts": [text]}, {"texts": [text] * 3}, {"texts": [text], "holder": f"app {number}"})
    bad = (
        {"texts": [text] * 20, "unknown": text},
        {"texts": [number, None, {}, text * 20]},
        {"texts": [text * 40], "holder": text},
        {"chunks": [{"id": text, "text": text * 20}]},
        [[[[text]]]],
        {text: {text: text * 20}},
    )
    damaged = (draw.randbytes(draw.randrange(16_000)), b"{" * draw.randrange(1, 500), (text * 20).encode())
    chosen = draw.choice((*good, *bad, *damaged))
    return chosen if isinstance(chosen, bytes) else json.dumps(chosen, ensure_ascii=False).encode()


async def test_requests_do_not_grow_the_servers_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest keeps every record
    server, draw = Server(None), Random(0)
    answered = {200: 0, 422: 0}
    sent = 0
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(server.app), base_url="http://server", headers=JSON
    ) as client:

        async def send(count: int) -> None:
            nonlocal sent
            for number in range(count):
                content = body(draw, number)
                sent += len(content)
                answer = await client.post("/v1/chunks", content=content)
                answered[answer.status_code] += 1
                for name in {chunk["id"] for chunk in answer.json().get("data", ())}:
                    (await client.get(f"/v1/chunks/{name}")).raise_for_status()
                    (await client.delete("/v1/chunks", params={"id": name})).raise_for_status()

        await send(ROUND)  # the first round loads modules and fills caches
        before = resident_bytes()
        await send(2 * ROUND)
        grown = resident_bytes() - before
    assert len(server.registry) == 0
    assert min(answered.values()) > ROUND / 4
    assert sent > 3 * ALLOWED_BYTES
    assert grown < ALLOWED_BYTES, f"{grown / 2**20:.1f} MiB more after {2 * ROUND} requests"
