"""Tests the chunks that each tenant of a server may see, over the routes of /v1/chunks, on a client without a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk
from cacheblend_rag.retrieval.index import ChunkIndex, IndexConfig
from cacheblend_rag.server.keys import Key, Keys, Quota
from cacheblend_rag.server.middleware import NAMES, RequestLimits, answer_errors
from cacheblend_rag.server.observing import ReuseMetrics
from cacheblend_rag.server.routes import chunk_router
from cacheblend_rag.server.tenants import ServedTenants, calling
from cacheblend_rag.store.files import DEFAULT, Namespace
from tests.server.test_routes import INFO, MODEL, Client

# Acme and Globex are competing tenants; only Acme reads the chunks of the tenant public.
TENANTS = (DEFAULT, Namespace("public"), Namespace("acme", ("public",)), Namespace("globex"))
NAMES_OF = [tenant.name for tenant in TENANTS]
TEXTS = [f"Page {number} of the harbour log, as both of them may have it." for number in range(5)]
IDS = [None, "policy", "manual"]


class Server:
    def __init__(
        self, directory: Path, tenants: tuple[Namespace, ...] = TENANTS, quotas: Mapping[str, Quota] | None = None
    ):
        self.client = Client()
        self.tenants = ServedTenants.open(self.client, directory, tenants, 1000, quotas or {})  # type: ignore[arg-type]
        self.app = FastAPI()
        answer_errors(self.app)
        self.app.include_router(chunk_router(self.tenants, ReuseMetrics(CollectorRegistry()), INFO))
        keys = [Key.of(tenant.name) for tenant in tenants]
        self.app.state.limits = RequestLimits(
            Keys(tuple(Key(key.digest, "admin", tenant.name) for key, tenant in zip(keys, tenants, strict=True)))
        )
        for name in NAMES:
            self.app.add_middleware(resolve_name(name))

    async def __call__(self, tenant: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        headers = {"Authorization": f"Bearer {tenant}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            return await client.request(method, f"/v1/chunks{path}", **arguments)

    async def register(self, tenant: str, text: str, name: str | None = None) -> httpx.Response:
        body = {"text": text} if name is None else {"text": text, "id": name}
        return await self(tenant, "POST", "", json={"chunks": [body]})

    def stored(self, tenant: str, text: str) -> bool:
        """Return whether a tenant's own key has KV of a text."""
        tokens = make_chunk(text, self.client.tokenizer).token_ids
        return any(map(self.client.store.contains, self.client.entries.within(Namespace(tenant)).keys(tokens)))

    def found(self, tenant: str, text: str) -> list[str]:
        """Return the texts of the chunks that are found in a prompt."""
        registry = self.tenants.each[tenant].client.registry
        return [piece.text for piece in registry.find(f"Before. {text} Behind.") if isinstance(piece, Chunk)]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@dataclass
class Model:
    """The registered texts of each tenant by id."""

    own: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in NAMES_OF})

    def readable(self, tenant: Namespace) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in (*reversed(tenant.reads), tenant.name):
            found |= self.own[name]
        return found

    def texts(self, tenant: Namespace) -> set[str]:
        return {text for name in (tenant.name, *tenant.reads) for text in self.own[name].values()}


@dataclass
class Act:
    """One random request."""

    tenant: str
    kind: str
    text: str
    name: str | None

    async def send(self, server: Server) -> httpx.Response:
        name = self.name or chunk_id(self.text)
        match self.kind:
            case "register":
                return await server.register(self.tenant, self.text, self.name)
            case "delete":
                return await server(self.tenant, "DELETE", f"/{name}")
            case "delete several":
                return await server(self.tenant, "DELETE", f"?id={name}&id=policy")
            case "delete all":
                return await server(self.tenant, "DELETE", "?all=true")
            case "inspect":
                return await server(self.tenant, "GET", f"/{name}")
            case "stats":
                return await server(self.tenant, "GET", "/stats")
        return await server(self.tenant, "GET", "?limit=50")


KINDS = ["register"] * 6 + ["delete"] * 3 + ["delete several", "delete all", "inspect", "list", "stats"]


def acts(dice: random.Random, count: int, names: list[str]) -> list[Act]:
    return [Act(dice.choice(names), dice.choice(KINDS), dice.choice(TEXTS), dice.choice(IDS)) for _ in range(count)]


def expect(model: Model, act: Act) -> int:
    """Do ``act`` in the model; return its status."""
    own, name = model.own[act.tenant], act.name or chunk_id(act.text)
    tenant = next(tenant for tenant in TENANTS if tenant.name == act.tenant)
    match act.kind:
        case "register":
            if own.get(name, act.text) != act.text:
                return 409
            own[name] = act.text
        case "delete":
            if name not in own:
                return 409 if name in model.readable(tenant) else 404
            del own[name]
        case "delete several":
            for each in (name, "policy"):
                own.pop(each, None)
        case "delete all":
            own.clear()
        case "inspect":
            return 200 if name in model.readable(tenant) else 404
    return 200


@pytest.mark.slow
async def test_each_tenant_sees_its_own_and_its_readable_chunks_after_any_requests(tmp_path: Path) -> None:
    server, model, dice = Server(tmp_path), Model(), random.Random(0)
    for act in acts(dice, 160, NAMES_OF):
        status = expect(model, act)
        answer = await act.send(server)
        assert answer.status_code == status, (act, answer.text)
        for tenant in TENANTS:
            own, readable = model.own[tenant.name], model.texts(tenant)
            for text in TEXTS:  # before the list is read, which would load registrations of other tenants
                assert server.found(tenant.name, text) == [text] * (text in readable)
                assert server.stored(tenant.name, text) == (text in own.values())
            listed = (await server(tenant.name, "GET", "?limit=50")).json()["data"]
            assert [chunk["id"] for chunk in listed] == sorted(own)
            assert (await server(tenant.name, "GET", "/stats")).json()["chunks"] == len(own)


def comparable(answer: httpx.Response) -> Any:
    """Return an answer without its times."""
    body = answer.json()
    for chunk in [body, *body.get("data", [])]:
        chunk.pop("last_used", None)
    body.pop("report", None)
    return answer.status_code, body


@pytest.mark.slow
async def test_requests_of_other_tenants_do_not_change_a_tenants_answers(tmp_path: Path) -> None:
    dice = random.Random(0)
    alone, shared = Server(tmp_path / "alone"), Server(tmp_path / "shared")
    for act in acts(dice, 80, ["globex"]):
        for other in acts(dice, dice.randrange(3), ["acme", "public"]):
            await other.send(shared)
        assert comparable(await act.send(shared)) == comparable(await act.send(alone)), act
        assert [shared.found("globex", text) for text in TEXTS] == [alone.found("globex", text) for text in TEXTS]


async def test_registered_chunks_are_known_to_their_tenant_after_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.register("acme", TEXTS[0], "policy")
    await server.register("public", TEXTS[1])
    server.tenants.close()
    again = Server(tmp_path)
    assert [again.found("acme", text) for text in TEXTS[:2]] == [[TEXTS[0]], [TEXTS[1]]]
    assert [again.found("globex", text) for text in TEXTS[:2]] == [[], []]
    assert (await again("acme", "GET", "/policy")).json()["origin"] == "registered"
    shared = (await again("acme", "GET", f"/{chunk_id(TEXTS[1])}")).json()
    assert (shared["origin"], shared["text"]) == ("shared", TEXTS[1])


async def test_an_own_id_takes_precedence_over_the_same_id_of_a_readable_tenant(server: Server) -> None:
    await server.register("public", TEXTS[0], "policy")
    assert (await server.register("acme", TEXTS[1], "policy")).status_code == 200
    assert (await server("acme", "GET", "/policy")).json()["text"] == TEXTS[1]
    assert (await server("acme", "DELETE", "/policy")).json()["deleted"]
    assert (await server("acme", "GET", "/policy")).json()["text"] == TEXTS[0]


async def test_deleting_a_chunk_deletes_the_kv_that_prompts_of_its_readers_stored(tmp_path: Path) -> None:
    """Readers store the model's own KV of a first chunk beside the shared KV of a KV writer."""
    server = Server(tmp_path, (DEFAULT, Namespace("public", ("acme",)), Namespace("acme", ("public",))))
    for tenant, text in (("public", TEXTS[0]), ("public", TEXTS[1]), ("acme", TEXTS[1])):
        await server.register(tenant, text)
    reader = server.tenants.each["acme"].client
    await reader.store_kv([make_chunk(text, reader.tokenizer) for text in TEXTS[:2]])
    assert (await server("public", "DELETE", "?all=true")).status_code == 200
    assert [server.stored("acme", text) for text in TEXTS[:2]] == [False, True], "what it has registered itself stays"


async def test_an_index_belongs_to_the_default_tenant_and_is_read_by_its_readers(tmp_path: Path) -> None:
    tenants = (DEFAULT, Namespace("acme", ("default",)), Namespace("globex"))
    text = make_chunk(TEXTS[0], Client().tokenizer)
    with ChunkIndex(tmp_path, IndexConfig(MODEL)) as index:
        server = Server(tmp_path, tenants)
        index.add("a.md", "1", [text])
        for served in server.tenants.each.values():
            served.catalogue.refresh(force=True)
        assert [server.found(name, TEXTS[0]) for name in ("default", "acme", "globex")] == [[TEXTS[0]], [TEXTS[0]], []]
        assert (await server("acme", "GET", f"/{text.id}")).json()["origin"] == "shared"
        assert (await server("acme", "DELETE", f"/{text.id}")).status_code == 409
        assert (await server("globex", "DELETE", f"/{text.id}")).status_code == 404
        server.tenants.close()


async def test_a_chunk_lives_as_long_as_one_client_of_its_tenant_holds_it(tmp_path: Path) -> None:
    server, text = Server(tmp_path), TEXTS[0]
    for holder in ("app", "app", "other"):
        await server("acme", "POST", "", json={"chunks": [{"text": text}], "holder": holder})
    await server.register("globex", text)
    name = chunk_id(text)

    async def release(tenant: str, holder: str) -> list[str]:
        answer = await server(tenant, "DELETE", f"?id={name}&holder={holder}")
        return [each["id"] for each in answer.json()["data"]]

    assert await release("acme", "app") == await release("acme", "nobody") == []
    assert server.stored("acme", text)
    server.tenants.close()
    server = Server(tmp_path)  # a restart with a new store
    assert server.found("acme", text) == [text]
    assert await release("acme", "other") == [name]
    assert (server.found("acme", text), server.stored("acme", text)) == ([], False)
    assert server.found("globex", text) == [text]  # another tenant's chunk is a different chunk
    # A deletion without a holder deletes the chunk for every holder.
    await server("globex", "POST", "", json={"chunks": [{"text": text}], "holder": "app"})
    assert (await server("globex", "DELETE", f"?id={name}")).json()["data"]
    assert not server.found("globex", text)
    assert (await server("globex", "DELETE", "?all=true&holder=app")).status_code == 422


async def test_only_the_operator_sees_the_statistics_of_the_whole_store(server: Server) -> None:
    await server.register("acme", TEXTS[0])
    assert (await server("default", "GET", "/stats")).json()["kv"]["entries"] == 1
    for name in NAMES_OF[1:]:
        assert (await server(name, "GET", "/stats")).json()["kv"] is None


def test_code_that_serves_no_request_has_no_tenant(server: Server) -> None:
    for ask in (calling.get, lambda: server.tenants.current):
        with pytest.raises(LookupError):
            Context().run(ask)  # an empty context holds nothing from other tests


@pytest.mark.parametrize("name", ["", "Acme", "a b", "a:b", "../a", "-a", "a.", "a" * 64, "ä", 7, None])
def test_an_invalid_tenant_name_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match="cannot name a tenant"):
        Namespace(name)


@pytest.mark.parametrize("reads", [("acme",), ("public", "public"), tuple(f"t{number}" for number in range(7))])
def test_reading_itself_duplicates_or_too_many_tenants_is_refused(reads: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="each once"):
        Namespace("acme", reads)


def test_prompts_of_different_tenants_never_share_a_salt() -> None:
    own = [None, "client:", "client:x", "client:tenant:acme", "cacheblend-1", "a1b2"]
    salts = [tenant.salt(salt) for tenant in TENANTS for salt in own]
    assert len(set(salts)) == len(salts)
    assert [Namespace.salted(salt) for salt in salts] == [tenant.name for tenant in TENANTS for _ in own]


async def test_errors_show_the_servers_paths_only_to_the_operator(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = f"cannot write to the KV store {tmp_path}: the disk is full; free some space"

    async def fails(chunks: list[Chunk]) -> PrecomputeReport:
        return PrecomputeReport(failed={"a": full, "b": "it has no tokens"})

    for name, served in server.tenants.each.items():
        monkeypatch.setattr(served.client, "store_kv", fails)
        failed = (await server.register(name, TEXTS[0])).json()["report"]["failed"]
        assert failed["b"] == "it has no tokens" and (str(tmp_path) in failed["a"]) == (name == "default")
    damaged = server.tenants.each["acme"].catalogue._registered.damaged("checksum")
    for name, served in server.tenants.each.items():
        monkeypatch.setattr(served.catalogue, "refresh", mock.Mock(side_effect=damaged))
        answer = await server(name, "GET", "/a")
        message = answer.json()["error"]["message"]
        assert (answer.status_code, str(tmp_path) in message) == (507, name == "default")
        assert name == "default" or message.startswith("The server's store cannot be used now;")
