"""Tests the routes of /v1/chunks over HTTP, on a client without a model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from cacheblend_rag.blending.outcome import Lack, PromptOutcome, Usage
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.protocol import ModelInfo
from cacheblend_rag.retrieval.registered import RegisteredChunks
from cacheblend_rag.server.keys import Quota, QuotaError
from cacheblend_rag.server.middleware import NAMES, RequestLimits, answer_errors
from cacheblend_rag.server.observing import ReuseMetrics
from cacheblend_rag.server.routes import chunk_router
from cacheblend_rag.server.tenants import ServedTenants
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.files import DEFAULT, Namespace
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint
from cacheblend_rag.store.kvfile import EntryFormat
from tests.conftest import tokenizer_named
from tests.outcomes import lacking
from tests.store.samples import sample_keys

MODEL = ModelFingerprint("a" * 32, "one")
TEXTS = [f"Entry number {i} of the harbour log." for i in range(4)]


class Client:
    """Stores KV of zeros, and fails for the texts in :attr:`fails`."""

    def __init__(self) -> None:
        self.tokenizer, self.fingerprint, self.header_ids = tokenizer_named("byte_level"), MODEL, (1, 2)
        self.registry, self.store, self.context_window = ChunkRegistry(), MemoryStore(1 << 30), 500
        self.entries = Entries(self.store, MODEL, self.header_ids, 0, 1)
        self.gate, self.namespace = SimpleNamespace(passed=True), DEFAULT
        self.llm = SimpleNamespace(errored=False)
        self.fails: set[str] = set()

    def of(self, tenant: Namespace) -> Client:
        other = copy.copy(self)
        other.registry, other.namespace, other.entries = ChunkRegistry(), tenant, self.entries.within(tenant)
        return other

    async def drain(self) -> None:
        """Do nothing: there is no background work."""

    async def store_kv(self, chunks: list[Chunk]) -> PrecomputeReport:
        for chunk in chunks:
            if chunk.text not in self.fails:
                zeros = torch.zeros(1, len(chunk.token_ids), 2)
                self.entries.put(chunk.token_ids, ChunkKV([LayerKV(zeros, zeros)], 2))
        failed = {chunk.id: "no room" for chunk in chunks if chunk.text in self.fails}
        return PrecomputeReport(len(chunks) - len(failed), failed=failed)


INFO = ModelInfo(
    name="one",
    served_as=("one",),
    fingerprint="a" * 32,
    tokenizer="bundled",
    tokenizer_probe=(1,),
    header_ids=(1, 2),
    context_window=500,
    blended=True,
    num_layers=1,
    profile=ModelProfile(),
)


class Server:
    def __init__(self, directory: Path | None, most: int = 1_000_000) -> None:
        self.client = Client()
        self.registry = self.client.registry
        self.tenants = tenants = ServedTenants.open(self.client, directory, [DEFAULT], most)  # type: ignore[arg-type]
        self.catalogue = tenants.each["default"].catalogue
        self.app = FastAPI()
        answer_errors(self.app)
        router = chunk_router(tenants, ReuseMetrics(CollectorRegistry()), INFO)
        self.app.include_router(router)
        self.app.state.limits = RequestLimits()
        for name in NAMES:
            self.app.add_middleware(resolve_name(name))

    async def __call__(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, f"/v1/chunks{path}", **arguments)

    async def register(self, *chunks: Any) -> httpx.Response:
        bodies = [{"text": chunk} if isinstance(chunk, str) else chunk for chunk in chunks]
        return await self("POST", "", json={"chunks": bodies})

    def stored(self, text: str) -> bool:
        return self.client.entries.contains(make_chunk(text, self.client.tokenizer).token_ids)

    def found(self, text: str) -> list[str]:
        return [piece.id for piece in self.registry.find(text) if isinstance(piece, Chunk)]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def test_a_refused_post_leaves_nothing_registered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(server.catalogue._registered, "add", full)
    for _ in range(3):
        assert (await server.register(*TEXTS)).status_code == 507
    assert len(server.registry) == 0
    assert server.found(TEXTS[0]) == []


async def test_chunks_whose_kv_could_not_be_stored_are_not_registered(server: Server) -> None:
    server.client.fails = {TEXTS[1]}
    answer = (await server.register(*TEXTS)).json()
    assert [chunk["stored"] for chunk in answer["data"]] == [True, False, True, True]
    assert (len(server.registry), server.found(TEXTS[1])) == (3, [])


async def test_an_unblended_model_registers_chunks_without_kv(server: Server) -> None:
    server.client.gate.passed, server.client.fails = False, set(TEXTS)
    assert (await server.register(*TEXTS)).status_code == 200
    assert len(server.registry) == 4


def held_up(server: Server, requests: int) -> asyncio.Barrier:
    """Let registrations with stored KV wait until ``requests`` of them have come."""
    barrier, store = asyncio.Barrier(requests), server.client.store_kv

    async def store_kv(chunks: list[Chunk]) -> PrecomputeReport:
        report = await store(chunks)
        await barrier.wait()
        return report

    server.client.store_kv = store_kv  # type: ignore[method-assign]
    return barrier


async def test_one_of_ten_concurrent_texts_gets_an_id_and_the_other_nine_leave_no_kv(server: Server) -> None:
    held_up(server, 10)
    texts = [f"Berth {number} of the harbour." for number in range(10)]
    answers = await asyncio.gather(*(server.register({"id": "berth", "text": text}) for text in texts))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 9
    (kept,) = (text for text, answer in zip(texts, answers, strict=True) if answer.status_code == 200)
    assert (await server("GET", "/berth")).json()["text"] == kept
    assert [text for text in texts if server.stored(text)] == [kept]
    await server("DELETE", "?all=true")
    assert list(server.client.store.entries()) == []


async def test_two_servers_of_one_store_give_an_id_to_one_text(tmp_path: Path) -> None:
    servers = [Server(tmp_path) for _ in range(2)]
    barrier = held_up(servers[0], 2)
    held_up(servers[1], 1)
    first = asyncio.create_task(servers[0].register({"id": "berth", "text": TEXTS[0]}))
    while not barrier.n_waiting:
        await asyncio.sleep(0)
    assert (await servers[1].register({"id": "berth", "text": TEXTS[1]})).status_code == 200
    await barrier.wait()
    assert ((await first).status_code, servers[0].stored(TEXTS[0])) == (409, False)
    assert (await servers[0]("GET", "/berth")).json()["text"] == TEXTS[1]


@pytest.mark.parametrize("taken", [False, True])
async def test_a_deletion_leaves_the_kv_of_a_text_that_is_being_registered_under_another_id(
    server: Server, taken: bool
) -> None:
    await server.register({"id": "old", "text": TEXTS[0]})
    barrier = held_up(server, 2)
    coming = asyncio.create_task(server.register({"id": "new", "text": TEXTS[0]}))
    while not barrier.n_waiting:
        await asyncio.sleep(0)
    await server("DELETE", "/old")
    assert server.stored(TEXTS[0])
    if taken:
        server.catalogue.add([Chunk("new", TEXTS[1], make_chunk(TEXTS[1], server.client.tokenizer).token_ids)])
    await barrier.wait()
    # A chunk registered without KV would let a later prompt store KV that counts in no quota.
    assert ((await coming).status_code, server.stored(TEXTS[0])) == ((409, False) if taken else (200, True))
    if not taken:
        assert server.catalogue._registered.kv_bytes() > 0


async def test_a_registration_that_fails_leaves_no_kv(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.client.store_kv

    async def dies(chunks: list[Chunk]) -> PrecomputeReport:
        await store(chunks)
        raise StoreError("the disk is full")

    server.client.store_kv = dies  # type: ignore[method-assign]
    assert (await server.register(TEXTS[0])).status_code == 507
    assert not server.stored(TEXTS[0])


async def test_a_stopping_server_waits_until_an_interrupted_registration_has_left_no_kv(server: Server) -> None:
    store, begun, ended = server.client.store_kv, asyncio.Event(), asyncio.Event()

    async def dies(chunks: list[Chunk]) -> PrecomputeReport:
        await store(chunks)
        begun.set()
        await ended.wait()
        raise StoreError("the engine has died")

    server.client.store_kv = dies  # type: ignore[method-assign]
    request = asyncio.ensure_future(server.register(TEXTS[0]))
    await begun.wait()
    settled = asyncio.ensure_future(server.tenants.settle([], 60))
    await asyncio.sleep(0)
    assert (settled.done(), server.stored(TEXTS[0])) == (False, True)
    ended.set()
    await settled
    assert not server.stored(TEXTS[0])
    assert (await request).status_code == 507


async def test_kv_written_by_a_worker_after_its_registration_was_interrupted_is_deleted(server: Server) -> None:
    store, chunks = server.client.store_kv, list[Chunk]()

    async def dies(wanted: list[Chunk]) -> PrecomputeReport:
        chunks.extend(wanted)
        server.client.llm.errored = True
        raise StoreError("the engine has died")

    server.client.store_kv = dies  # type: ignore[method-assign]
    # The server runs a registration in a task: `settle` waits for these tasks.
    await asyncio.ensure_future(server.register(TEXTS[0]))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        settled = asyncio.ensure_future(server.tenants.settle([psutil.Process(worker.pid)], 60))
        await store(chunks)
        assert not settled.done()
        worker.communicate(b"\n")
        await settled
    assert not server.stored(TEXTS[0])


@pytest.mark.parametrize("chunk_id", ["a\nb", "a\n", "\n", "a\r\n", "a/b\n/c"])
async def test_an_id_with_line_breaks_names_only_its_own_chunk(server: Server, chunk_id: str) -> None:
    await server.register({"id": chunk_id, "text": TEXTS[0]}, {"id": "a", "text": TEXTS[1]})
    path = "/" + quote(chunk_id, safe="")
    assert (await server("GET", path)).json()["text"] == TEXTS[0]
    assert (await server("DELETE", path)).status_code == 200
    assert (await server("GET", path)).status_code == 404
    assert (await server("GET", "/a")).json()["text"] == TEXTS[1]


@pytest.mark.parametrize("number", ["NaN", "1e999", '{"deep": [0, -Infinity]}'])
async def test_metadata_with_numbers_outside_json_are_refused(server: Server, number: str) -> None:
    body = b'{"chunks": [{"text": "A text.", "metadata": {"n": %s}}]}' % number.encode()
    refused = await server("POST", "", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, len(server.registry)) == (422, 0)
    assert "chunks.0: the metadata" in refused.json()["error"]["message"]


async def test_metadata_beyond_the_size_limit_are_refused(server: Server) -> None:
    refused = await server.register({"text": TEXTS[0], "metadata": {"source": "x" * 70_000}})
    assert (refused.status_code, server.stored(TEXTS[0])) == (422, False)
    assert "chunks.0: its metadata have 70014 bytes" in refused.json()["error"]["message"]
    assert (await server.register({"text": TEXTS[0], "metadata": {"source": "x" * 60_000}})).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "?limit=1000"), ("DELETE", "?id=unknown")])
async def test_concurrent_listings_or_deletions_take_one_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    running = most = 0

    async def in_a_thread(function: Any, *arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(100):  # all other requests could begin meanwhile
            await asyncio.sleep(0)
        running -= 1
        return function(*arguments)

    monkeypatch.setattr("cacheblend_rag.server.routes.asyncio.to_thread", in_a_thread)
    answers = await asyncio.gather(*(server(method, path) for _ in range(8)))
    assert ([answer.status_code for answer in answers], most) == ([200] * 8, 1)


async def test_a_page_of_chunks_is_read_in_parts_of_at_most_256(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.register(*({"id": f"{number:03}", "text": f"Berth {number}."} for number in range(600)))
    read = server.catalogue._registered.named_after
    counts: list[int] = []
    monkeypatch.setattr(
        server.catalogue._registered,
        "named_after",
        lambda name, most: counts.append(most) or read(name, most),  # type: ignore[func-returns-value]
    )
    page = (await server("GET", "?limit=400&after=099")).json()
    assert [chunk["id"] for chunk in page["data"]] == [f"{number:03}" for number in range(100, 500)]
    assert page["has_more"] and page["last_id"] == "499" and max(counts) <= 256


async def test_all_chunks_are_deleted_in_parts_of_at_most_256(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.register(*(f"Berth {number}." for number in range(600)))
    remove, counts = server.catalogue.remove, []
    monkeypatch.setattr(server.catalogue, "remove", lambda names: counts.append(len(names)) or remove(names))
    assert len((await server("DELETE", "?all=true")).json()["data"]) == sum(counts) == 600
    assert max(counts) <= 256 and (len(server.registry), list(server.client.store.entries())) == (0, [])


async def test_a_deletion_of_named_chunks_and_of_all_chunks_is_refused(server: Server) -> None:
    await server.register({"id": "a", "text": TEXTS[0]}, {"id": "b", "text": TEXTS[1]})
    refused = await server("DELETE", "?id=a&all=true")
    assert (refused.status_code, len(server.registry)) == (422, 2)


async def test_a_chunk_that_is_named_twice_is_deleted_once(server: Server) -> None:
    await server.register({"id": "a", "text": TEXTS[0]}, {"id": "b", "text": TEXTS[1]})
    gone = (await server("DELETE", "?id=a&id=b&id=a")).json()["data"]
    assert [each["id"] for each in gone] == ["a", "b"]


async def test_an_id_with_a_nul_is_refused_and_finds_no_other_chunk(server: Server) -> None:
    await server.register({"id": "a", "text": TEXTS[1]})
    refused = await server.register({"id": "a\0b", "text": TEXTS[0]})
    assert (refused.status_code, server.stored(TEXTS[0])) == (422, False)
    assert "chunks.0: the id 'a\\x00b' has a NUL" in refused.json()["error"]["message"]
    assert (await server("GET", "/a%00b")).status_code == 404
    await server("DELETE", "?id=a%00b")
    assert (await server("GET", "/a")).status_code == 200


async def test_registrations_beyond_max_chunks_are_refused_before_computing(tmp_path: Path) -> None:
    server = Server(tmp_path, most=3)
    assert (await server.register(*TEXTS[:2])).status_code == 200
    refused = await server.register(*TEXTS)
    assert refused.status_code == 507
    assert "--max-chunks" in refused.json()["error"]["message"] and "the 3 that" in refused.json()["error"]["message"]
    assert (len(server.registry), server.stored(TEXTS[2])) == (2, False)
    assert (await server.register(*TEXTS[:3])).status_code == 200  # registered chunks take no more room
    assert (await server("DELETE", f"?id={server.found(TEXTS[0])[0]}")).status_code == 200
    assert (await server.register(TEXTS[3])).status_code == 200


@pytest.mark.parametrize("counts", ["count", "kv_bytes"])
async def test_two_servers_of_one_store_together_exceed_no_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: str
) -> None:
    monkeypatch.setattr(RegisteredChunks, "busy_timeout_s", 0.0)
    one, two = (Server(tmp_path).catalogue for _ in range(2))
    first, second = (make_chunk(text, tokenizer_named("byte_level")) for text in TEXTS[:2])
    for each in (one, two):
        each._quota = Quota(max_chunks=1) if counts == "count" else Quota(max_kv=10)
    looked = getattr(one._registered, counts)

    def meanwhile(*arguments: Any) -> int:
        found = looked(*arguments)
        with contextlib.suppress(StoreError):  # the second server must wait
            two.add([second], {second.id: 10})
        return found

    monkeypatch.setattr(one._registered, counts, meanwhile)
    one.add([first], {first.id: 10})
    assert (two._registered.count(), two._registered.kv_bytes()) == (1, 10)
    with pytest.raises(QuotaError):
        two.add([second], {second.id: 10})


async def test_deleting_one_of_two_ids_of_a_text_keeps_the_kv_and_matches_of_the_other_id(
    server: Server,
) -> None:
    text = TEXTS[0]
    await server.register({"text": text, "id": "first"}, {"text": text, "id": "second"})
    assert server.found(text) == ["first"]
    assert (await server("DELETE", "/first")).status_code == 200
    assert (server.found(text), server.stored(text)) == (["second"], True)
    assert (await server("GET", "/second")).json()["stored"]
    assert (await server("DELETE", "?id=second")).json()["data"][0]["id"] == "second"
    assert (server.found(text), server.stored(text)) == ([], False)
    await server.register({"text": text, "id": "first"}, text)
    await server("DELETE", "/first")
    assert server.stored(text)
    await server("DELETE", "?all=true")
    assert not server.stored(text)


@pytest.mark.parametrize("name", ["docs/a.md#1", "/begins", "ends/", "a//b", "ünï côde?&#", "stats/x", "100%"])
async def test_any_id_can_be_fetched_and_deleted(server: Server, name: str) -> None:
    assert (await server.register({"text": TEXTS[0], "id": name})).status_code == 200
    path = "/" + quote(name, safe="")
    assert (await server("GET", path)).json()["id"] == name
    assert (await server("DELETE", path)).json()["deleted"]
    assert (await server("GET", path)).status_code == 404


async def test_refusals_for_lack_of_room_are_answered_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, paused, most = Server(tmp_path, most=1), 0, 0

    async def pause(seconds: float) -> None:
        nonlocal paused, most
        paused += 1
        most = max(most, paused)
        for _ in range(100):  # all other requests could be refused meanwhile
            await original(0)
        paused -= 1

    original = asyncio.sleep
    monkeypatch.setattr("cacheblend_rag.server.routes.asyncio.sleep", pause)
    answers = await asyncio.gather(*(full.register(*TEXTS[:2]) for _ in range(4)))
    assert ([answer.status_code for answer in answers], most) == ([507] * 4, 1)


async def test_an_id_that_a_route_would_hide_is_refused(server: Server) -> None:
    refused = await server.register({"text": TEXTS[0], "id": "stats"})
    assert (refused.status_code, len(server.registry)) == (422, 0)
    assert "chunks.0: the id 'stats'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None, "x-json"]
)
async def test_bodies_of_other_types_than_json_are_refused(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = await server("POST", "", content=b'{"texts": ["A text from a page of another site."]}', headers=headers)
    assert (answer.status_code, len(server.registry)) == (415, 0)
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_json_bodies_are_read_under_every_json_media_type(server: Server, kind: str) -> None:
    body = b'{"texts": ["A text from a client of this server."]}'
    assert (await server("POST", "", content=body, headers={"Content-Type": kind})).status_code == 200


async def test_two_texts_under_one_id_are_refused_and_a_repeated_text_is_accepted(server: Server) -> None:
    refused = await server.register({"text": TEXTS[0], "id": "policy"}, TEXTS[2], {"text": TEXTS[1], "id": "policy"})
    assert refused.status_code == 422
    assert "chunks.2" in refused.json()["error"]["message"] and "policy" in refused.json()["error"]["message"]
    assert len(server.registry) == 0
    same = {"text": TEXTS[0], "id": "policy"}
    assert (await server.register(same, same)).status_code == 200
    assert len(server.registry) == 1


async def test_a_chunk_of_a_prompt_takes_no_id_that_a_client_may_register(server: Server) -> None:
    brought = make_chunk(TEXTS[0], server.client.tokenizer)
    server.catalogue.note(Chunk("policy", brought.text, brought.token_ids))
    assert (await server("GET", "/policy")).status_code == 404
    server.catalogue.note(Chunk(make_chunk(TEXTS[1], server.client.tokenizer).id, brought.text, brought.token_ids))
    server.catalogue.note(brought)
    assert [chunk.text for chunk in server.registry] == [TEXTS[0]]
    assert (await server.register({"text": TEXTS[1], "id": "policy"})).status_code == 200
    assert (await server.register({"text": TEXTS[0], "id": "policy"})).status_code == 409


def blend_client(server: Server, store_kv: Callable[[Any], Any]) -> Any:
    """Return a real client without a vLLM."""
    from cacheblend_rag.engines.vllm.client import BlendClient

    client: Any = BlendClient.__new__(BlendClient)
    client.registry, client._entries, client.namespace = server.registry, server.client.entries, DEFAULT
    client._write_back, client.ranking, client._background, client.costs = True, "off", set(), None
    client.writer = None
    client.store_kv = store_kv
    return client


@pytest.mark.slow
def test_a_client_is_refused_within_a_namespace_without_a_key() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    from cacheblend_rag.engines.vllm.client import BlendClient

    client: Any = BlendClient.__new__(BlendClient)
    client.store = MemoryStore()
    client.store.format = EntryFormat(keys=sample_keys())  # of the tenants default and acme
    assert client.of(Namespace("acme")).namespace.name == "acme"
    with pytest.raises(InputError, match="no key of the tenant 'globex'"):
        client.of(Namespace("globex"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kv", "own_kv"])
async def test_a_chunk_deleted_during_write_back_stays_deleted(server: Server, what: Lack) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    await server.register({"text": TEXTS[0], "id": "gone"}, {"text": TEXTS[1], "id": "kept"})
    server.client.entries.delete(server.registry.get("kept").token_ids)  # type: ignore[union-attr]

    async def slowly(chunks: list[Chunk]) -> PrecomputeReport:
        await server("DELETE", "/gone")
        return await server.client.store_kv(chunks)

    client = blend_client(server, slowly)
    client.store_own = slowly
    from cacheblend_rag.engines.vllm.messages import FinishReport

    outcome = PromptOutcome("blend", "", Usage(9, 0, 0, 9), chunks=lacking("gone", "kept", what=what))
    client.finished(FinishReport(outcome))
    await client.drain()
    assert server.registry.get("gone") is None
    assert (server.stored(TEXTS[0]), server.stored(TEXTS[1])) == (False, True)


async def test_unregistered_chunks_of_prompts_are_bounded_in_characters(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.server.catalogue._MAX_NOTED_CHARACTERS", 100)
    for text in TEXTS:
        server.catalogue.note(make_chunk(text, server.client.tokenizer))
    assert [bool(server.found(text)) for text in TEXTS] == [False, False, True, True]


def test_an_encrypted_store_serves_no_tenant_without_a_key() -> None:
    client = Client()
    client.store.format = EntryFormat(keys=sample_keys())  # of the tenants default and acme
    client.entries = Entries(client.store, MODEL, client.header_ids, 0, 1)
    opened = ServedTenants.open(client, None, [DEFAULT, Namespace("acme")], 10)  # type: ignore[arg-type]
    opened.close()
    with pytest.raises(InputError, match="no key of the tenant 'globex'"):
        ServedTenants.open(client, None, [DEFAULT, Namespace("globex")], 10)  # type: ignore[arg-type]
