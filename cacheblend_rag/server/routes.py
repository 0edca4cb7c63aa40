"""Routes ``/v1/chunks``: precompute, list, inspect and delete chunks. What they do is in ``chunks.py``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.protocol import DeleteQuery, ModelInfo, PageQuery, PrecomputeBody, StrictModel, read_query
from cacheblend_rag.server.chunks import ServedChunks
from cacheblend_rag.server.middleware import come_again, error_response, told
from cacheblend_rag.server.tenants import PerNamespace, Served, calling
from cacheblend_rag.store import StoreStats
from cacheblend_rag.store.base import stats_of

if TYPE_CHECKING:
    from cacheblend_rag.server.observing import ReuseMetrics


class StoredChunk(StrictModel):
    """A chunk that was sent, and whether its KV is stored now."""

    id: str
    object: Literal["chunk"] = "chunk"
    tokens: int
    stored: bool


class Precomputed(StrictModel):
    """The answer of ``POST /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[StoredChunk]
    report: PrecomputeReport


class ListedChunk(StrictModel):
    """A chunk as a listing shows it; the size of its KV in bytes, its last use in seconds since the epoch."""

    id: str
    object: Literal["chunk"] = "chunk"
    tokens: int
    origin: str
    source: str
    stored: bool
    bytes: int | None
    last_used: float | None


class ChunkPage(StrictModel):
    """The answer of ``GET /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[ListedChunk]
    has_more: bool
    last_id: str | None


class ChunkDetail(ListedChunk):
    """The answer of ``GET /v1/chunks/{id}``."""

    text: str
    token_ids: list[int]
    metadata: dict[str, Any]


class DeletedChunk(StrictModel):
    """A chunk that is gone."""

    id: str
    object: Literal["chunk"] = "chunk"
    deleted: Literal[True] = True


class DeletedChunks(StrictModel):
    """The answer of ``DELETE /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[DeletedChunk]


class ChunkStats(StrictModel):
    """The answer of ``GET /v1/chunks/stats``; what the store holds is the operator's to see."""

    chunks: int
    kv: StoreStats | None
    model: ModelInfo


class Flushed(StrictModel):
    """The answer of ``POST /v1/chunks/flush``."""

    object: Literal["flush"] = "flush"
    done: Literal[True] = True


class ErrorDetail(BaseModel):
    """Says what was wrong, and what to do about it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """An error, as OpenAI's clients read it."""

    error: ErrorDetail


_TEXTS = ("texts", "chunks")
"""One of these is in the body of ``POST /v1/chunks``."""
_EVERYWHERE = {
    401: "No key, or none that is known.",
    403: "The key's role is too small.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    421: "Without a key, another name than this machine's.",
    422: "The request cannot be read, or holds what cannot be.",
    507: "The store cannot be used, or has no room.",
}
_OWN = {
    404: "No chunk has that id.",
    409: "The id is another text's, or the chunk is not the caller's to change.",
    415: "The body is no JSON.",
    429: "The tenant's quota is used up; `Retry-After` says for how many seconds.",
}


def described(
    answer: type[BaseModel], errors: tuple[int, ...] = (), extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what FastAPI is told of a route besides its path: what it answers, and with which statuses it refuses."""
    refusals = _EVERYWHERE | {status: _OWN[status] for status in errors}
    return {
        "response_model": answer,
        "responses": {status: {"model": ErrorBody, "description": text} for status, text in refusals.items()},
        "openapi_extra": extra or {},
    }


def json_body() -> dict[str, Any]:
    """Return the request of ``POST /v1/chunks``, which the route reads by itself."""
    schema = _inlined(PrecomputeBody.model_json_schema())
    for name in _TEXTS:
        schema["properties"][name]["minItems"] = 1
    schema["oneOf"] = [{"required": [name]} for name in _TEXTS]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without references: pydantic's are to the schema itself, OpenAPI's to the whole document."""
    definitions: Mapping[str, Any] = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return resolve(definitions[part["$ref"].rpartition("/")[2]])
            return {name: resolve(value) for name, value in part.items()}
        return [resolve(each) for each in part] if isinstance(part, list) else part

    found: dict[str, Any] = resolve(schema)
    return found


_JSON = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_REFUSED_S = 0.1
"""How long a refusal for want of room takes."""
T = TypeVar("T")
_Route = Callable[..., Awaitable[Any]]


def chunk_router(served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo) -> APIRouter:
    """Return the routes of :class:`ChunkRoutes`, for an application that :func:`answer_errors` has been given."""
    routes = ChunkRoutes(served, metrics, model)
    router = APIRouter(prefix="/v1/chunks", tags=["chunks"])
    ids = {"name": "id", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}, "explode": True}
    table: list[tuple[str, str, _Route, dict[str, Any]]] = [
        ("POST", "", routes.precompute, described(Precomputed, (409, 415, 429), json_body())),
        ("GET", "", routes.list_chunks, described(ChunkPage, (), {"parameters": _parameters(PageQuery)})),
        # Before /{chunk_id}: the first path that fits is taken.
        ("GET", "/stats", routes.stats, described(ChunkStats)),
        ("POST", "/flush", routes.flush, described(Flushed, (429,))),
        ("GET", "/{chunk_id:any_text}", routes.inspect, described(ChunkDetail, (404,))),
        ("DELETE", "/{chunk_id:any_text}", routes.delete, described(DeletedChunk, (404, 409))),
        (
            "DELETE",
            "",
            routes.delete_several,
            described(DeletedChunks, (409,), {"parameters": [ids, *_parameters(DeleteQuery)]}),
        ),
    ]
    for method, path, route, said in table:
        router.add_api_route(path, route, methods=[method], **said)
    return router


class _AnyText(Convertor[str]):
    """The rest of a path, whatever it holds. Starlette's own ends before a line break, and so names another chunk."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """Return ``value``."""
        return value

    def to_string(self, value: str) -> str:
        """Return ``value``."""
        return value


register_url_convertor("any_text", _AnyText())


class ChunkRoutes:
    """Requests to ``/v1/chunks`` and their answers; what is done is in :class:`ServedChunks`.

    Each is about the chunks of the namespace that its key is for, and of no other.
    """

    def __init__(self, served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo):
        self._served, self._metrics, self._model = served, metrics, model

    @property
    def _chunks(self) -> ServedChunks:
        return self._served.current.chunks

    async def _in_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do ``work`` in a thread, one at a time of each tenant: who asks without end takes one, and not those of others."""
        async with self._served.current.looking:
            return await asyncio.to_thread(work, *arguments)

    async def precompute(self, request: Request) -> Precomputed | Response:
        """Compute and store the KV of texts, and register them; texts that are stored already cost nothing."""
        # What a page of another site sends without asking the browser's leave is of other types.
        if not _JSON.fullmatch(request.headers.get("content-type", "")):
            return error_response(
                "Send JSON, with the header 'Content-Type: application/json'.", 415, "UnsupportedMediaType"
            )
        served, admission = self._served.current, calling.get().admission
        # One at a time: who registers without end, most of all beyond a quota, takes his own time and not that of others.
        async with served.reading:
            try:
                wanted, holder = await asyncio.to_thread(served.chunks.read, await request.body())
            except StoreError:
                await asyncio.sleep(_REFUSED_S)
                raise
            refusal = admission.refusal(0)
            due = await asyncio.to_thread(served.chunks.to_compute, wanted) if admission.counts and not refusal else 0
            admission.charge(due)  # before it is computed: the next one must know of it
        task = asyncio.current_task()
        assert task is not None
        served.registering.add(task)
        task.add_done_callback(served.registering.discard)
        try:
            if refusal is not None:
                return come_again(*refusal)
            report = await served.client.store_kv(wanted)
            self._metrics.precomputed(report, served.client.namespace.name)
            admission.charge(report.tokens - due)
            await asyncio.to_thread(served.chunks.keep, wanted, report, holder)
        finally:
            await asyncio.to_thread(served.chunks.settle, wanted)
            if served.client.llm.errored:
                served.cut_short.extend(wanted)
        stored = [
            StoredChunk(id=chunk.id, tokens=len(chunk.token_ids), stored=chunk.id not in report.failed)
            for chunk in wanted
        ]
        return Precomputed(data=stored, report=replace(report, failed=told(report.failed)))

    async def list_chunks(self, request: Request) -> dict[str, Any]:
        """List chunks in the order of their ids, a page at a time: ``?limit=100&after=ID``."""
        query = read_query(PageQuery, request.query_params)
        found, more = await self._in_turn(self._chunks.page, query.limit, query.after)
        return {"data": found, "has_more": more, "last_id": found[-1]["id"] if found else None}

    async def stats(self) -> ChunkStats:
        """Say how many chunks there are, which model this is, and to the operator what the store holds."""
        served = self._served.current
        await self._in_turn(served.catalogue.refresh)
        # The store is everybody's: its counters would tell one what the others do.
        seen = self._served.alone or calling.get().operator
        held = await asyncio.to_thread(stats_of, served.client.store) if seen else None
        return ChunkStats(chunks=len(served.client.registry), kv=held, model=self._model)

    async def flush(self) -> Flushed:
        """Wait until the chunks that finished answers found missing have been stored."""
        await self._served.current.client.drain()
        return Flushed()

    async def inspect(self, chunk_id: str) -> dict[str, Any]:
        """Return one chunk with its text, tokens and metadata."""
        chunk = await self._in_turn(self._chunks.known, chunk_id)
        described = await self._in_turn(self._chunks.describe, chunk)
        detail = {"text": chunk.text, "token_ids": list(chunk.token_ids), "metadata": dict(chunk.metadata)}
        return {**described, **json.loads(json.dumps(detail, default=str))}

    async def delete(self, chunk_id: str) -> DeletedChunk:
        """Forget a chunk and drop its KV."""
        await self._in_turn(lambda: self._chunks.delete([self._chunks.known(chunk_id)]))
        return DeletedChunk(id=chunk_id)

    async def delete_several(self, request: Request) -> DeletedChunks:
        """Forget several chunks (``?id=…&id=…``), or all (``?all=true``); not those of the index, nor unknown ids.

        ``&holder=NAME``: for that client alone, so that what others hold stays.
        """
        query = read_query(DeleteQuery, request.query_params)
        everything = query.all
        if everything and query.holder is not None:
            raise InputError("holder goes with ?id=..., not with ?all=true, which deletes whoever holds the chunks.")
        chunk_ids = request.query_params.getlist("id")
        if bool(chunk_ids) == everything:
            raise InputError(
                "Name the chunks to delete, as ?id=...&id=..., or give ?all=true for every registered one."
            )
        gone = await self._in_turn(self._chunks.delete_named, chunk_ids, everything, query.holder)
        return DeletedChunks(data=[DeletedChunk(id=name) for name in gone])
