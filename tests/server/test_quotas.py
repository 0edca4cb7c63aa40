"""Tests the quotas of tenants: refusals, their messages to clients, and tokens that are given back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import chunk_id, make_chunk
from cacheblend_rag.retrieval.index import ChunkIndex, IndexConfig
from cacheblend_rag.server.keys import NO_QUOTA, Admission, Key, Quota, TokenBucket, read_keys
from cacheblend_rag.server.observing import ReuseMetrics
from cacheblend_rag.server.tenants import Caller, Served, ServedTenants, calling
from cacheblend_rag.store.files import DEFAULT, Namespace
from tests.server.test_keys import written
from tests.server.test_middleware import App
from tests.server.test_routes import MODEL
from tests.server.test_tenants import TEXTS, Server


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 200), st.integers(0, 20_000)), min_size=1, max_size=40),
)
def test_a_bucket_admits_no_more_tokens_than_flow_in_and_waits_no_longer_than_needed(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, clock)
    taken = last = 0
    for pause, tokens in steps:
        clock.now += pause
        wait = bucket.wait_s()
        # All requests but the last, which may leave a debt, stay within a minute's tokens and the inflow since the start.
        allowed = rate + (clock.now - 1000.0) * rate / 60
        if wait == 0:
            assert taken <= allowed + 1e-6 * allowed
            bucket.take(tokens)
            taken, last = taken + tokens, tokens
        else:
            clock.now += wait
            assert bucket.wait_s() < 1e-6
            assert taken - last <= allowed + 1e-6 * allowed


def test_a_bucket_holds_at_most_one_minute_of_tokens() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    clock.now += 3600
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1.0)
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(61.0)


def limited(quota: Quota, clock: Clock | None = None) -> App:
    keys = [Key(Key.of(name).digest, "admin", name) for name in ("acme", "globex")]
    admission = Admission(quota, clock or Clock())
    return App(keys, admissions={"acme": admission})


async def ask(app: App, tenant: str, method: str = "POST") -> httpx.Response:
    async with app.client() as client:
        return await client.request(method, "/v1/chunks", headers={"Authorization": f"Bearer {tenant}"})


async def test_concurrent_requests_beyond_the_quota_get_retry_after_and_other_tenants_are_served() -> None:
    begun, go_on, calls = asyncio.Semaphore(0), asyncio.Event(), count()

    async def slowly(_: Any) -> PlainTextResponse:
        begun.release()
        if next(calls) < 2:  # a request that is let in wrongly is answered as well
            await go_on.wait()
        return PlainTextResponse("served")

    app = with_route(limited(Quota(max_concurrent=2)), slowly)
    waiting = [asyncio.create_task(ask(app, "acme")) for _ in range(2)]
    for _ in range(2):
        await begun.acquire()
    refused = await ask(app, "acme")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "2 answers" in refused.json()["error"]["message"]
    other = asyncio.create_task(ask(app, "globex"))
    await begun.acquire()
    go_on.set()
    assert [(await task).status_code for task in (*waiting, other)] == [200, 200, 200]
    assert (await ask(app, "acme")).status_code == 200


def with_route(app: App, endpoint: Any) -> App:
    """Replace ``/v1/chunks`` of an application."""
    app.app.router.routes[:] = [Route("/v1/chunks", endpoint, methods=["GET", "POST"])]
    return app


async def test_a_client_that_leaves_its_stream_frees_its_place_in_the_quota() -> None:
    begun, calls = asyncio.Event(), count()

    async def endless(_: Any) -> StreamingResponse:
        first = next(calls) == 0

        async def pieces() -> Any:
            while first:  # the stream of a request that is let in wrongly ends
                yield b"piece"
                begun.set()
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    app = with_route(limited(Quota(max_concurrent=1)), endless)
    gone = asyncio.Event()
    scope = {"type": "http", "method": "POST", "path": "/v1/chunks", "query_string": b"", "headers": []}
    scope |= {"headers": [(b"authorization", b"Bearer acme")], "http_version": "1.1"}
    given = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    streaming = asyncio.create_task(app.app(scope, receive, send))  # type: ignore[arg-type]
    await begun.wait()
    assert (await ask(app, "acme", "POST")).status_code == 429
    gone.set()
    await streaming
    admission = app.app.state.limits.admissions["acme"]
    assert admission.refusal() is None


async def test_a_tenant_without_tokens_gets_the_seconds_until_it_has_more() -> None:
    clock = Clock()
    app = limited(Quota(tokens_per_minute=600), clock)
    admission = app.app.state.limits.admissions["acme"]
    assert (await ask(app, "acme")).status_code == 200
    admission.charge(900)
    refused = await ask(app, "acme")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "31")
    assert "600 tokens a minute" in refused.json()["error"]["message"]
    assert (await ask(app, "acme", "GET")).status_code == 200
    assert (await ask(app, "globex")).status_code == 200
    clock.now += 31
    assert (await ask(app, "acme")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pieces"), [("DELTA", [[1], [2, 3]]), ("CUMULATIVE", [[1], [1, 2, 3]])])
@pytest.mark.parametrize("until", [0, 1, 2])
async def test_the_prompt_and_the_answered_tokens_are_charged_even_if_the_client_leaves(
    kind: str, pieces: list[list[int]], until: int
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind

    from cacheblend_rag.blending.outcome import PromptOutcome, Usage
    from cacheblend_rag.engines.vllm.messages import FinishReport
    from cacheblend_rag.server.served_engine import ServedEngine
    from cacheblend_rag.store.kv import ModelFingerprint

    class Engine:
        async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> Any:
            for number, ids in enumerate(pieces):
                done = number == len(pieces) - 1
                piece = CompletionOutput(0, "", ids, None, None, finish_reason="stop" if done else None)
                yield RequestOutput(request_id, None, [7] * 10, None, [piece], done)

    charged: list[int] = []
    client: Any = SimpleNamespace(
        namespace=Namespace("acme"),
        report=lambda *_, **__: FinishReport(PromptOutcome("prefill", "", Usage(10, 0, 0, 10, 3))),
        finished=lambda _: None,
        trace_headers=lambda _: None,
        gate=SimpleNamespace(passed=True),
        fingerprint=ModelFingerprint("f" * 32, "x"),
    )
    admission: Any = SimpleNamespace(charge=charged.append, counts=False, quota=NO_QUOTA)
    calling.set(Caller("acme", False, admission))
    tenants = ServedTenants({"acme": Served(client, None)})  # type: ignore[arg-type]
    served = ServedEngine(Engine(), tenants, ReuseMetrics(CollectorRegistry()))  # type: ignore[arg-type]
    sampling = SamplingParams(output_kind=RequestOutputKind[kind])
    stream = served.generate({"type": "token", "prompt_token_ids": [7] * 10}, sampling, "r")
    for _ in range(until):
        await anext(stream)
    await stream.aclose()
    # A request that never began costs nothing.
    assert sum(charged) == [0, 10 + 1, 10 + 3][until]


async def test_registrations_beyond_max_chunks_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, quotas={"acme": Quota(max_chunks=1)})
    assert (await server.register("acme", TEXTS[0])).status_code == 200
    refused = await server.register("acme", TEXTS[1])
    assert (refused.status_code, server.stored("acme", TEXTS[1])) == (507, False)
    assert "max_chunks" in refused.json()["error"]["message"]
    assert (await server.register("acme", TEXTS[0])).status_code == 200
    for text in TEXTS:
        assert (await server.register("globex", text)).status_code == 200


async def test_registrations_beyond_max_kv_are_refused_and_leave_no_kv(tmp_path: Path) -> None:
    probe = Server(tmp_path / "probe")
    await probe.register("acme", TEXTS[0])
    size = (await probe("acme", "GET", f"/{chunk_id(TEXTS[0])}")).json()["bytes"]
    server = Server(tmp_path / "store", quotas={"acme": Quota(max_kv=int(2.5 * size))})
    for text in TEXTS[:2]:
        assert (await server.register("acme", text)).status_code == 200
    refused = await server.register("acme", TEXTS[2])
    assert (refused.status_code, server.stored("acme", TEXTS[2]), server.found("acme", TEXTS[2])) == (507, False, [])
    assert "max_kv" in refused.json()["error"]["message"]
    assert (await server.register("acme", TEXTS[1])).status_code == 200  # a registered text takes no more room
    assert server.stored("acme", TEXTS[1])
    assert (await server("acme", "DELETE", f"/{chunk_id(TEXTS[0])}")).status_code == 200
    assert (await server.register("acme", TEXTS[2])).status_code == 200


async def test_a_refused_text_leaves_no_kv_even_if_a_readable_tenant_stores_it(tmp_path: Path) -> None:
    server = Server(tmp_path, quotas={"acme": Quota(max_kv=1)})
    assert (await server.register("public", TEXTS[0])).status_code == 200
    assert (await server.register("acme", TEXTS[0])).status_code == 507
    assert [server.stored(tenant, TEXTS[0]) for tenant in ("acme", "public")] == [False, True]


async def test_registrations_are_charged_in_advance_and_settled_to_the_computed_tokens(tmp_path: Path) -> None:
    server, quota = Server(tmp_path), Quota(tokens_per_minute=20)  # a text has more tokens
    admission, begun, go_on = Admission(quota, Clock()), list[Any](), asyncio.Event()
    client: Any = server.tenants.each["acme"].client
    server.app.state.limits = replace(server.app.state.limits, admissions={"acme": admission})
    store = client.store_kv

    async def store_kv(chunks: list[Any]) -> Any:
        begun.append(chunks)
        await go_on.wait()
        return replace(await store(chunks), tokens=sum(len(chunk.token_ids) for chunk in chunks))

    client.store_kv = store_kv
    asked = [asyncio.create_task(server.register("acme", text)) for text in TEXTS]
    while sum(task.done() for task in asked) + len(begun) < len(asked):
        await asyncio.sleep(0)
    assert len(begun) == 1
    refused = [task.result() for task in asked if task.done()]
    assert all(answer.status_code == 429 and int(answer.headers["retry-after"]) > 1 for answer in refused)
    go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*asked)].count(200) == 1
    assert admission._bucket is not None
    assert admission._bucket._level == 20 - len(begun[0][0].token_ids)
    assert not server.tenants.each["acme"].chunks._coming.total()
    admission._bucket._level = 20.0
    kept = {chunk.text for chunk in begun[0]}
    store_nothing = replace(await store(begun[0]), tokens=0)
    client.store_kv = lambda _: asyncio.sleep(0, store_nothing)
    assert (await server.register("acme", kept.pop())).status_code == 200
    assert admission._bucket._level == 20


async def test_registrations_expire_with_their_kv_on_every_server_unless_they_are_renewed(tmp_path: Path) -> None:
    quotas = {"acme": Quota(expire_after_s=100)}
    servers = [Server(tmp_path, quotas=quotas) for _ in range(2)]
    clock = Clock()
    for server in servers:
        server.tenants.each["acme"].catalogue._clock = clock
    one, two = servers
    for tenant in ("acme", "globex"):
        for text in TEXTS[:2]:
            await one.register(tenant, text)
    clock.now += 60
    await one.register("acme", TEXTS[1])
    clock.now += 39
    one.tenants.each["acme"].chunks.expire()
    assert one.found("acme", TEXTS[0]) == [TEXTS[0]]
    clock.now += 1
    for tenant in ("acme", "globex"):
        one.tenants.each[tenant].chunks.expire()
        for server in servers:
            server.tenants.each[tenant].catalogue.refresh()
    for server in servers:
        assert [server.found("acme", text) for text in TEXTS[:2]] == [[], [TEXTS[1]]]
        assert [server.found("globex", text) for text in TEXTS[:2]] == [[TEXTS[0]], [TEXTS[1]]]
    assert (await two("acme", "GET", f"/{chunk_id(TEXTS[0])}")).status_code == 404
    assert [one.stored("acme", text) for text in TEXTS[:2]] == [False, True]
    assert one.stored("globex", TEXTS[0])


async def test_an_expired_registration_that_the_index_holds_too_keeps_its_kv(tmp_path: Path) -> None:
    server = Server(tmp_path, (DEFAULT,), quotas={"default": Quota(expire_after_s=100)})
    own, clock = server.tenants.each["default"], Clock()
    own.catalogue._clock = clock
    for text in TEXTS[:2]:
        await server.register("default", text)
    with ChunkIndex(tmp_path, IndexConfig(MODEL)) as index:
        index.add("a.md", "1", [make_chunk(TEXTS[0], server.client.tokenizer)])
        own.catalogue.refresh(force=True)
        clock.now += 100
        own.chunks.expire()
        assert [server.stored("default", text) for text in TEXTS[:2]] == [True, False]
        assert [server.found("default", text) for text in TEXTS[:2]] == [[TEXTS[0]], []]
        server.tenants.close()


async def test_a_server_removes_expired_registrations_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.server.catalogue._REFRESH_S", 0.001)
    server = Server(tmp_path, (DEFAULT, Namespace("acme")), quotas={"acme": Quota(expire_after_s=100)})
    acme, clock = server.tenants.each["acme"], Clock()
    acme.catalogue._clock = clock
    await server.register("acme", TEXTS[0])
    clock.now += 100
    server.tenants.watch()
    async with asyncio.timeout(60):
        while server.stored("acme", TEXTS[0]):
            await asyncio.sleep(0)
    server.tenants.close()
    assert len(acme.client.registry) == 0


TABLE = """
[[key]]
value = "k"
role = "write"
tenant = "acme"

[[tenant]]
name = "acme"
max_chunks = 10_000
max_kv = "50GiB"
tokens_per_minute = 60_000
max_concurrent = 8
expire_after = "30d"
"""


def test_quotas_are_read_with_their_units(tmp_path: Path) -> None:
    found = read_keys(written(tmp_path, TABLE))
    assert found.quotas == {"acme": Quota(10_000, 50 << 30, 60_000, 8, 30 * 86400.0)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_chunks = 0", "tenant.0.max_chunks"),
        ("max_kv = 'much'", "tenant.0.max_kv"),
        ("tokens_per_minute = -1", "tenant.0.tokens_per_minute"),
        ("max_concurrent = 'all'", "tenant.0.max_concurrent"),
        ("expire_after = 30", "tenant.0.expire_after.*7d"),
        ("tokens_per_second = 1", "tenant.0.tokens_per_second"),
    ],
)
def test_an_invalid_quota_is_refused_by_name(tmp_path: Path, line: str, said: str) -> None:
    name = line.split(" ", maxsplit=1)[0]
    text = "\n".join(each for each in TABLE.splitlines() if not each.startswith(name)) + f"\n{line}\n"
    with pytest.raises(InputError, match=said):
        read_keys(written(tmp_path, text))


async def test_a_registration_beyond_the_quota_is_refused_before_tokenising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, quotas={"acme": Quota(max_chunks=1)})
    assert (await server.register("acme", TEXTS[0])).status_code == 200

    def tokenised(*_: Any) -> Any:
        raise AssertionError("a text that is refused was tokenised")

    monkeypatch.setattr("cacheblend_rag.server.chunks.make_chunk", tokenised)
    assert (await server.register("acme", f"  {TEXTS[1]} ")).status_code == 507
