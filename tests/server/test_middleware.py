"""Tests the API key and the size limit on a bare ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cacheblend_rag.server import amounts, middleware
from cacheblend_rag.server.keys import Admission, Key, Keys
from cacheblend_rag.server.middleware import NAMES, RequestLimits


class App:
    def __init__(self, keys: Sequence[str | Key] = (), limit: int = 100, **limits: Any):
        self.bodies: list[bytes] = []
        routes = [Route(path, self._serve, methods=["GET", "POST"]) for path in ("/health", "/metrics", "/v1/chunks")]
        self.app = Starlette(routes=routes)
        self.app.state.limits = RequestLimits(
            Keys(tuple(key if isinstance(key, Key) else Key.of(key) for key in keys)), limit, **limits
        )
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
async def test_requests_without_the_key_are_refused_before_their_bodies_are_read(path: str, header: str | None) -> None:
    app = App(["right", "other"])
    headers = {} if header is None else {"Authorization": header}
    async with app.client() as client:
        answer = await client.post(path, headers=headers, content=b"x" * 1000)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401
    assert app.bodies == []


async def test_either_key_is_accepted_and_health_needs_no_key() -> None:
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
async def test_bodies_up_to_the_limit_arrive_unchanged_and_larger_bodies_are_refused(
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


class Connection:
    """A client whose body never ends; counts the pieces that are read."""

    def __init__(self, method: str, path: str, *headers: tuple[bytes, bytes], pieces: int = 10**6):
        self.scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
        self.read, self._pieces = 0, pieces
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if self.read == self._pieces:
            await asyncio.Event().wait()
        self.read += 1
        return {"type": "http.request", "body": b"x" * 50, "more_body": True}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, app: App) -> int:
        await app.app(self.scope, self.receive, self.send)
        return int(self.sent[0]["status"])


async def test_no_body_is_read_for_requests_without_a_key() -> None:
    app = App(["right"])
    health = Connection("GET", "/health")
    assert (await health.ask(app), health.read, app.bodies) == (200, 0, [b""])
    asked = ((b"origin", b"http://elsewhere"), (b"access-control-request-method", b"POST"))
    preflight = Connection("OPTIONS", "/v1/chunks", *asked)
    assert await preflight.ask(app) != 401
    assert preflight.read == 0
    other = Connection("POST", "/health")
    assert (await other.ask(app), other.read) == (401, 0)


async def test_a_body_that_does_not_arrive_in_time_is_answered_408() -> None:
    app = App(limit=10_000, body_deadline_s=0.01)
    slow = Connection("POST", "/v1/chunks", pieces=3)
    assert (await slow.ask(app), slow.read, app.bodies) == (408, 3, [])
    assert (b"connection", b"close") in slow.sent[0]["headers"]


async def test_reading_a_body_stops_at_the_limit() -> None:
    app = App(limit=100)
    large = Connection("POST", "/v1/chunks")
    assert (await large.ask(app), large.read, app.bodies) == (413, 3, [])


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_bodies_of_the_tokenize_routes_have_a_smaller_limit(path: str) -> None:
    app = App(limit=100 + middleware.TOKENIZED_LIMIT)
    async with app.client() as client:
        for more, status in ((0, 404), (1, 413)):  # the bare application has no such route
            assert (await client.post(path, content=b"x" * (middleware.TOKENIZED_LIMIT + more))).status_code == status
        assert (await client.post("/v1/chunks", content=b"x" * (middleware.TOKENIZED_LIMIT + 1))).status_code == 200


async def test_concurrent_bodies_of_a_tenant_are_limited_without_affecting_other_tenants() -> None:
    keys = [replace(Key.of(name), tenant=name) for name in ("loud", "quiet")]
    admissions = {"loud": Admission(), "quiet": Admission()}
    app = App(keys, limit=1000, held=200, admissions=admissions)
    loud = [Connection("POST", "/v1/chunks", (b"authorization", b"Bearer loud"), pieces=3) for _ in range(2)]
    waiting = [asyncio.ensure_future(connection.ask(app)) for connection in loud]
    refused = await waiting[1]
    assert (refused, admissions["loud"].held) == (429, 150)
    assert (b"retry-after", b"1") in loud[1].sent[0]["headers"]
    async with app.client() as client:
        answer = await client.post("/v1/chunks", content=b"x" * 150, headers={"Authorization": "Bearer quiet"})
    assert (answer.status_code, app.bodies) == (200, [b"x" * 150])
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (admissions["loud"].held, admissions["quiet"].held) == (0, 0)


async def test_a_client_that_disconnects_within_its_body_reaches_no_route() -> None:
    app = App()
    gone = Connection("POST", "/v1/chunks")
    messages = iter([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    await app.app(gone.scope, receive, gone.send)
    assert (app.bodies, gone.sent) == ([], [])


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("127.9.9.9", True),
        ("[::1]:8000", True),
        ("attacker.example:8000", False),
        ("localhost.attacker.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("[::1", False),
    ],
)
async def test_a_server_without_a_key_answers_only_to_local_host_names(host: str, served: bool) -> None:
    app = App(local=True)
    async with app.client() as client:
        answer = await client.post("/v1/chunks", headers={"Host": host})
    assert answer.status_code == (200 if served else 421)
    assert len(app.bodies) == served
    async with App(["right"]).client() as client:
        headers = {"Host": host, "Authorization": "Bearer right"}
        assert (await client.post("/v1/chunks", headers=headers)).status_code == 200


_JSON = st.recursive(
    st.none() | st.integers() | st.text('\\"[]{},: a\n\u00e9'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('\\"[{,:a'), inner),
    max_leaves=40,
)


def _separators_outside_of_strings(found: Any) -> int:
    if isinstance(found, dict):
        return 1 + max(0, len(found) - 1) + sum(1 + _separators_outside_of_strings(value) for value in found.values())
    if isinstance(found, list):
        return 1 + max(0, len(found) - 1) + sum(map(_separators_outside_of_strings, found))
    return 0


@pytest.mark.slow
@given(value=_JSON, spaced=st.booleans(), ascii_alone=st.booleans())
def test_values_are_counted_only_outside_of_strings(value: Any, spaced: bool, ascii_alone: bool) -> None:
    text = json.dumps(value, separators=None if spaced else (",", ":"), ensure_ascii=ascii_alone).encode()
    there = _separators_outside_of_strings(value)
    for most in (there - 1, there):
        with mock.patch.object(amounts, "MOST_VALUES", most), mock.patch.object(amounts, "MOST_STRINGS", 10_000):
            assert amounts._has_too_many_values(text) == (there > most)


@pytest.mark.parametrize("part", [b'"', b'\\"', b'",', b"[", b'"a",', b'{"":'])
def test_values_of_hostile_bodies_are_counted_in_linear_time(part: bytes) -> None:
    body = part * (8_000_000 // len(part))
    assert amounts._has_too_many_values(b"1," * 600_000 + body)


async def test_bodies_of_too_many_values_are_refused_before_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amounts, "MOST_VALUES", 1000)
    app = App(limit=10_000)
    async with app.client() as client:
        refused = await client.post("/v1/chunks", content=b'{"chunks":[' + b'{"text":"a"},' * 400 + b'{"text":"a"}]}')
        served = await client.post("/v1/chunks", content=json.dumps({"texts": ['[{"a, b", c}: '] * 400}))
    assert (refused.status_code, len(app.bodies)) == (413, 1)
    assert "more than 1000 values" in refused.json()["error"]["message"]
    assert served.status_code == 200
