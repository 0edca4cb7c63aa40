"""Defines the routes ``/v1/chunks``: precompute, list, inspect and delete chunks; implemented in ``chunks.py``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response

from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.protocol import DeleteQuery, ModelInfo, PageQuery, PrecomputeBody, StrictModel, read_query
from cacheblend_rag.server.chunks import ServedChunks
from cacheblend_rag.server.middleware import come_again, error_response, told
from cacheblend_rag.server.tenants import PerNamespace, Served, calling
from cacheblend_rag.store import StoreStats

if TYPE_CHECKING:
    from cacheblend_rag.server.observing import ReuseMetrics


class StoredChunk(StrictModel):
    """Describes a chunk of a request, and whether its KV is stored now."""

    id: str
    object: Literal["chunk"] = "chunk"
    tokens: int
    stored: bool


class Precomputed(StrictModel):
    """Holds the answer of ``POST /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[StoredChunk]
    report: PrecomputeReport


class ListedChunk(StrictModel):
    """Describes a chunk in a listing: ``bytes`` of its KV, ``last_used`` in seconds since the epoch."""

    id: str
    object: Literal["chunk"] = "chunk"
    tokens: int
    origin: str
    source: str
    stored: bool
    bytes: int | None
    last_used: float | None


class ChunkPage(StrictModel):
    """Holds the answer of ``GET /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[ListedChunk]
    has_more: bool
    last_id: str | None


class ChunkDetail(ListedChunk):
    """Holds the answer of ``GET /v1/chunks/{id}``."""

    text: str
    token_ids: list[int]
    metadata: dict[str, Any]


class DeletedChunk(StrictModel):
    """Names a chunk that has been deleted."""

    id: str
    object: Literal["chunk"] = "chunk"
    deleted: Literal[True] = True


class DeletedChunks(StrictModel):
    """Holds the answer of ``DELETE /v1/chunks``."""

    object: Literal["list"] = "list"
    data: list[DeletedChunk]


class ChunkStats(StrictModel):
    """Holds the answer of ``GET /v1/chunks/stats``; with several tenants, only the operator gets ``kv``."""

    chunks: int
    kv: StoreStats | None
    model: ModelInfo


class Flushed(StrictModel):
    """Holds the answer of ``POST /v1/chunks/flush``."""

    object: Literal["flush"] = "flush"
    done: Literal[True] = True


class ErrorDetail(BaseModel):
    """Describes an error and what to do about it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Holds an error in the shape that OpenAI clients read."""

    error: ErrorDetail


_TEXTS = ("texts", "chunks")
"""Fields of the body of ``POST /v1/chunks``, which contains exactly one of them."""
_EVERYWHERE = (401, 403, 408, 413, 421, 422, 507)
"""Statuses with which every route refuses requests."""


def described(
    answer: type[BaseModel], errors: tuple[int, ...] = (), extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return FastAPI's arguments for a route besides its path: the answer's model, and the statuses of refusals."""
    refusals: dict[int, Any] = {status: {"model": ErrorBody} for status in (*_EVERYWHERE, *errors)}
    return {
        "response_model": answer,
        "responses": refusals,
        "openapi_extra": extra or {},
    }


def json_body() -> dict[str, Any]:
    """Return the description of the body of ``POST /v1/chunks``, which the route itself parses."""
    schema = PrecomputeBody.model_json_schema()
    # Pydantic's references are to the schema itself, OpenAPI's to the whole document.
    schema["properties"]["chunks"]["items"] = schema.pop("$defs")["ChunkBody"]
    for name in _TEXTS:
        schema["properties"][name]["minItems"] = 1
    schema["oneOf"] = [{"required": [name]} for name in _TEXTS]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


_JSON = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_REFUSED_S = 0.1
"""Seconds that a refusal for lack of room is delayed."""
T = TypeVar("T")
_Route = Callable[..., Awaitable[Any]]


def chunk_router(served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo) -> APIRouter:
    """Return the routes of :class:`ChunkRoutes`, for an application prepared by :func:`answer_errors`."""
    routes = ChunkRoutes(served, metrics, model)
    router = APIRouter(prefix="/v1/chunks", tags=["chunks"])
    ids = {"name": "id", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}, "explode": True}
    table: list[tuple[str, str, _Route, dict[str, Any]]] = [
        ("POST", "", routes.precompute, described(Precomputed, (409, 415, 429), json_body())),
        ("GET", "", routes.list_chunks, described(ChunkPage, (), {"parameters": _parameters(PageQuery)})),
        # Before /{chunk_id}: the first matching path is used.
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


class _AnyText(PathConvertor):
    """Matches the rest of a path, line breaks included. Starlette's own convertor ends before a line break."""

    regex = "(?s:.*)"


register_url_convertor("any_text", _AnyText())


class ChunkRoutes:
    """Answers requests to ``/v1/chunks`` with the methods of :class:`ServedChunks`.

    Each request concerns only chunks in the namespace of the request's key.
    """

    def __init__(self, served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo):
        self._served, self._metrics, self._model = served, metrics, model

    @property
    def _chunks(self) -> ServedChunks:
        return self._served.current.chunks

    async def _in_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in a thread, one call at a time per tenant: no tenant can occupy more than one thread."""
        async with self._served.current.looking:
            return await asyncio.to_thread(work, *arguments)

    async def precompute(self, request: Request) -> Precomputed | Response:
        """Compute and store the KV of texts, and register the texts; texts that are stored already cost nothing."""
        # Without a CORS preflight, a page of another site can send only other content types.
        if not _JSON.fullmatch(request.headers.get("content-type", "")):
            return error_response(
                "Send JSON, with the header 'Content-Type: application/json'.", 415, "UnsupportedMediaType"
            )
        served, admission = self._served.current, calling.get().admission
        # One at a time: a tenant that registers without end, even beyond its quota, delays only itself.
        async with served.reading:
            try:
                wanted, holder = await asyncio.to_thread(served.chunks.read, await request.body())
            except StoreError:
                await asyncio.sleep(_REFUSED_S)
                raise
            refusal = admission.refusal(0)
            due = await asyncio.to_thread(served.chunks.to_compute, wanted) if admission.counts and not refusal else 0
            admission.charge(due)  # before computing, so that the next request sees the charge
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
        # GET /v1/chunks/stats tells everybody why a model is not blended.
        failed = told(report.failed) if served.client.gate.passed else report.failed
        return Precomputed(data=stored, report=replace(report, failed=failed))

    async def list_chunks(self, request: Request) -> dict[str, Any]:
        """List chunks in the order of their ids, a page at a time: ``?limit=100&after=ID``."""
        query = read_query(PageQuery, request.query_params)
        found, more = await self._in_turn(self._chunks.page, query.limit, query.after)
        return {"data": found, "has_more": more, "last_id": found[-1]["id"] if found else None}

    async def stats(self) -> ChunkStats:
        """Return the number of chunks, the model, and for the operator the contents of the store."""
        served = self._served.current
        await self._in_turn(served.catalogue.refresh)
        # All tenants share the store: its counters would reveal what other tenants do.
        seen = len(self._served.each) == 1 or calling.get().operator
        held = await asyncio.to_thread(served.client.store.stats) if seen else None
        return ChunkStats(chunks=len(served.client.registry), kv=held, model=self._model)

    async def flush(self) -> Flushed:
        """Wait until the KV that finished answers found missing has been stored."""
        await self._served.current.client.drain()
        return Flushed()

    async def inspect(self, chunk_id: str) -> dict[str, Any]:
        """Return one chunk with its text, tokens and metadata."""
        chunk = await self._in_turn(self._chunks.known, chunk_id)
        described = await self._in_turn(self._chunks.describe, chunk)
        detail = {"text": chunk.text, "token_ids": list(chunk.token_ids), "metadata": dict(chunk.metadata)}
        return {**described, **json.loads(json.dumps(detail, default=str))}

    async def delete(self, chunk_id: str) -> DeletedChunk:
        """Remove a chunk and delete its KV."""
        await self._in_turn(lambda: self._chunks.delete([self._chunks.known(chunk_id)]))
        return DeletedChunk(id=chunk_id)

    async def delete_several(self, request: Request) -> DeletedChunks:
        """Remove several chunks (``?id=…&id=…``) or all (``?all=true``), except chunks of the index; unknown ids are ignored.

        With ``&holder=NAME``, only this client releases the chunks, and chunks that other clients hold stay.
        """
        query = read_query(DeleteQuery, request.query_params)
        if query.all and query.holder is not None:
            raise InputError("holder goes with ?id=..., not with ?all=true, which deletes whoever holds the chunks.")
        chunk_ids = request.query_params.getlist("id")
        if bool(chunk_ids) == query.all:
            raise InputError(
                "Name the chunks to delete, as ?id=...&id=..., or give ?all=true for every registered one."
            )
        gone = await self._in_turn(self._chunks.delete_named, chunk_ids, query.all, query.holder)
        return DeletedChunks(data=[DeletedChunk(id=name) for name in gone])
