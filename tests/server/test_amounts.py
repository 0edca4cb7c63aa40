"""Tests the limits of a request: too long a text or too many values are refused before a route reads the body."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.server import amounts
from cacheblend_rag.server.amounts import FEWEST_CHARACTERS, MOST_ITEMS, most_characters, refusal
from cacheblend_rag.server.keys import Key
from cacheblend_rag.server.options import ServeOptions
from tests.server.test_arguments import parsed
from tests.server.test_middleware import App
from tests.server.test_routes import INFO, Server

WINDOW, TENANTS = 8192, ("loud", "quiet")
MOST = most_characters(WINDOW)
TOO_LONG, HUGE = b"A" * (MOST + 1), b"A" * (8 << 20)
Place = tuple[str | None, ...]
"""The path of a value in a body: names of members, and None for an element of a list."""
BATCHES = {
    "/v1/chunks": ["texts", "chunks"],
    "/v1/completions": ["prompt"],
    "/v1/completions/render": ["prompt"],
    "/v1/chat/completions/batch": ["messages"],
}


class House:
    """All routes of the server behind all of its checks; every route that is reached answers 200."""

    def __init__(self, directory: Path):
        from vllm.entrypoints.launchers.app import build_app

        from cacheblend_rag.server.launch import guard
        from cacheblend_rag.server.observing import ReuseMetrics
        from cacheblend_rag.server.routes import chunk_router

        options = ServeOptions(store=directory)
        args, _ = parsed(directory)
        limits = guard(options, args, WINDOW)
        self.app, self.reached = build_app(args, ("generate", "render"), None), list[str]()
        served: Any = Server(None).tenants
        self.app.include_router(chunk_router(served, ReuseMetrics(CollectorRegistry()), INFO))
        self.app.state.limits = limits
        self.schema: dict[str, Any] = self.app.openapi()
        for route in self.app.routes:
            if hasattr(route, "app"):
                route.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        await PlainTextResponse("")(scope, receive, send)

    async def post(self, path: str, body: bytes) -> int:
        """Send a body without the copies that a client makes; return the answer's status."""
        answers: list[Any] = []
        pieces = iter([{"type": "http.request", "body": body, "more_body": False}])
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": headers,
        }

        async def receive() -> Any:
            return next(pieces, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            answers.append(message)

        await self.app(scope, receive, send)
        return int(answers[0]["status"])

    def bodies(self) -> Iterator[tuple[str, Any]]:
        """Yield the routes that take JSON, each with the schema of its body."""
        for path, methods in self.schema["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content:
                yield path, content["application/json"]["schema"]

    def places(self, schema: Any, kind: str, above: tuple[str, ...] = ()) -> set[Place]:
        """Return the places of values of a kind in a schema; recursive schemas are entered once."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in above:
                return set()
            return self.places(self.schema["components"]["schemas"][name], kind, (*above, name))
        found: set[Place] = {()} if schema.get("type", kind) == kind and not _is_choice(schema) else set()
        for choice in ("anyOf", "oneOf", "allOf"):
            for each in schema.get(choice, ()):
                found |= self.places(each, kind, above)
        for name, each in schema.get("properties", {}).items():
            found |= {(name, *place) for place in self.places(each, kind, above)}
        for name, within in (("items", None), ("additionalProperties", "anything")):
            if isinstance(schema.get(name), dict):
                found |= {(within, *place) for place in self.places(schema[name], kind, above)}
        return found


def _is_choice(schema: Any) -> bool:
    return any(name in schema for name in ("anyOf", "oneOf", "allOf", "properties", "$ref"))


def at(place: Place, value: bytes) -> bytes:
    """Return a body that holds only a value at a place."""
    for part in reversed(place):
        value = b"[" + value + b"]" if part is None else b"{" + json.dumps(part).encode() + b":" + value + b"}"
    return value


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CACHEBLEND_API_KEY", "VLLM_API_KEY"):
            patch.delenv(name, raising=False)
        root = logging.getLogger()
        patch.setattr(root, "level", root.level)  # vLLM sets this level
        yield House(tmp_path_factory.mktemp("amounts"))
    root.setLevel(root.level)  # clears the cache of enabled levels


async def test_a_text_longer_than_any_prompt_is_refused_in_every_string_before_its_route_runs(
    house: House,
) -> None:
    house.reached.clear()
    seen, let_in = 0, list[Any]()
    for path, schema in house.bodies():
        text = HUGE
        for place in sorted(house.places(schema, "string"), key=len):
            seen += 1
            if await house.post(path, at(place, b'"' + text + b'"')) != 413:
                let_in.append((path, place))
            text = TOO_LONG  # only the first string of each route gets the huge text
    assert (let_in, house.reached) == ([], [])
    assert seen > 200


async def test_too_many_elements_are_refused_in_every_list_except_batches(house: House) -> None:
    house.reached.clear()
    body, batches = b"[" + b",".join([b"{}"] * (MOST_ITEMS + 1)) + b"]", list[Any]()
    for path, schema in house.bodies():
        for place in house.places(schema, "array"):
            if await house.post(path, at(place, body)) != 413:
                batches.append((path, *place))
    assert sorted(batches) == sorted((path, name) for path, names in BATCHES.items() for name in names)
    assert sorted(house.reached) == sorted(path for path, _ in batches)


async def test_every_route_accepts_a_body_within_the_limits(house: House) -> None:
    house.reached.clear()
    document, chunk = "word " * (MOST // 40), "word " * 400
    blocks = [{"type": "text", "text": document, "cache_control": {"type": "ephemeral"}} for _ in range(4)]
    turns = [{"role": "user", "content": "Who?"}] * (MOST_ITEMS - 5)
    sent = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": blocks}, *turns[: MOST_ITEMS // 4]]},
        "/v1/messages": {"messages": turns},
        "/v1/responses": {"input": turns},
        "/v1/completions": {"prompt": [document] * 64 + [[5] * WINDOW] * 2, "stop": ["a", "b"]},
        "/v1/chunks": {"texts": [chunk] * 4096 + [document]},
    }
    for path, body in sent.items():
        assert await house.post(path, json.dumps(body).encode()) == 200, path
    assert house.reached == list(sent)


REST, ITEMS = "x" * FEWEST_CHARACTERS, ["x"] * MOST_ITEMS


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5}] * 2}, "48 characters"),
        ("/v1/chat/completions", {"messages": "x" * 12, "tools": [{"x" * 10: 1}]}, "35 characters"),
        ("/v1/chat/completions", {"messages": "x" * 12, "stop": REST[:-12]}, ""),
        ("/v1/chat/completions", {"messages": "x", "stop": [REST]}, f"{FEWEST_CHARACTERS + 4} characters besides"),
        (
            "/v1/chat/completions",
            {"messages": "x", "metadata": {REST: 1}},
            f"{FEWEST_CHARACTERS + 8} characters besides",
        ),
        ("/v1/completions", {"prompt": ["x" * 20] * 9}, ""),
        ("/v1/completions", {"prompt": ["x" * 20, "x" * 31]}, "31 characters"),
        ("/v1/completions", {"prompt": "x" * 15, "cacheblend": {"spans": "x"}}, "37 characters"),
        ("/v1/completions", {"prompt": [[5] * 9000] * 9}, ""),
        ("/v1/completions", {"prompt": [[5] * 9000] * 9, "stop": [*ITEMS, "x"]}, "2049 messages"),
        ("/v1/chunks", {"texts": ["x" * 30] * 9000}, ""),
        ("/v1/chunks", {"chunks": [{"text": "x" * 30}]}, "34 characters"),
        ("/v1/chunks", {"chunks": [{"id": "x", "metadata": {"a": [*ITEMS, "x"]}}]}, "2061 characters"),
        ("/v1/responses", {"input": ["", *[""] * MOST_ITEMS]}, "2049 messages"),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "x"}], [{"role": "x" * 27}]]}, "31 characters"),
        ("/v1/chat/completions", [REST, "x"], f"{FEWEST_CHARACTERS + 1} characters besides"),
    ],
)
def test_each_prompt_of_a_body_has_a_character_limit_and_the_rest_has_another(path: str, body: Any, why: str) -> None:
    found = refusal(path, json.dumps(body).encode(), 30)
    assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize("body", [b"x" * (MOST + 1), b'{"texts": ["a"], ' + b"x" * MOST, b"[" * (MOST + 1)])
async def test_a_body_that_is_not_json_is_measured_as_text(house: House, body: bytes) -> None:
    assert await house.post("/v1/chunks", body) == 413
    house.reached.clear()
    assert await house.post("/v1/chunks", body[:1000]) == 200  # the route itself reports the error


async def test_other_tenants_are_served_while_a_body_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, served = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*given: Any) -> str:
        loop.call_soon_threadsafe(measuring.set)
        assert served.wait(60)
        return refusal(*given)

    monkeypatch.setattr("cacheblend_rag.server.middleware.refusal", slowly)
    app = App([Key(Key.of(name).digest, "write", name) for name in TENANTS], 1 << 20, characters=1000)
    async with app.client() as client:

        def ask(tenant: str, text: str) -> Any:
            return client.post(
                "/v1/chunks",
                content=b'{"texts": ["%s"]}' % text.encode(),
                headers={"Authorization": f"Bearer {tenant}"},
            )

        loud = asyncio.ensure_future(ask("loud", "x" * 5000))
        async with asyncio.timeout(60):
            await measuring.wait()
        quiet: httpx.Response = await ask("quiet", "Who?")
        served.set()
        refused = await loud
    assert (quiet.status_code, app.bodies) == (200, [b'{"texts": ["Who?"]}'])
    assert refused.status_code == 413
    assert "5000 characters" in refused.json()["error"]["message"]


def test_a_small_context_window_still_allows_the_fewest_characters() -> None:
    assert most_characters(512) == amounts.FEWEST_CHARACTERS
    assert most_characters(1 << 17) == 16 << 17
