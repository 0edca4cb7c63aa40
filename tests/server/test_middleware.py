"""The API key and the size limit, on a bare ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cacheblend_rag.server.middleware import NAMES, Limits


class App:
    def __init__(self, keys: list[str] | None = None, limit: int = 100):
        self.bodies: list[bytes] = []
        routes = [Route(path, self._serve, methods=["GET", "POST"]) for path in ("/health", "/metrics", "/v1/chunks")]
        self.app = Starlette(routes=routes)
        self.app.state.limits = Limits(tuple(keys or ()), limit)
        for name in NAMES:
            module, _, attribute = name.rpartition(".")
            self.app.add_middleware(getattr(import_module(module), attribute))

    async def _serve(self, request: Request) -> PlainTextResponse:
        self.bodies.append(await request.body())
        return PlainTextResponse("served")

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server")


@pytest.mark.parametrize("path", ["/metrics", "/v1/chunks", "/nowhere"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic right", "bearer  right", "right"])
async def test_requests_without_the_key_are_refused_before_anything_is_read(path: str, header: str | None) -> None:
    app = App(["right", "other"])
    headers = {} if header is None else {"Authorization": header}
    async with app.client() as client:
        answer = await client.post(path, headers=headers, content=b"x" * 1000)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401
    assert app.bodies == []


async def test_either_key_opens_and_health_needs_none() -> None:
    app = App(["right", "other"])
    async with app.client() as client:
        for key in ("right", "other"):
            assert (await client.get("/metrics", headers={"Authorization": f"Bearer {key}"})).text == "served"
        assert (await client.get("/health")).text == "served"
        asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
        assert (await client.options("/v1/chunks", headers=asked)).status_code != 401
        for headers in ({}, {"Origin": "http://elsewhere"}):
            assert (await client.options("/v1/chunks", headers=headers)).status_code == 401


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 60), max_size=5), declared=st.booleans())
async def test_bodies_up_to_the_limit_arrive_unchanged_and_larger_ones_never_do(
    sizes: list[int], declared: bool
) -> None:
    app = App(limit=100)
    whole = b"".join(bytes([65 + i]) * size for i, size in enumerate(sizes))

    async def pieces() -> AsyncIterator[bytes]:
        for i, size in enumerate(sizes):
            yield bytes([65 + i]) * size

    async with app.client() as client:
        answer = await client.post("/v1/chunks", content=whole if declared else pieces())
    if len(whole) <= 100:
        assert (answer.status_code, app.bodies) == (200, [whole])
    else:
        assert (answer.status_code, app.bodies) == (413, [])
        assert "100 bytes" in answer.json()["error"]["message"]
