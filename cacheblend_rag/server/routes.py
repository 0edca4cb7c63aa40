"""Routes ``/v1/chunks``: precompute, list, inspect and delete chunks. What they do is in ``chunks.py``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import JSONResponse, Response

from cacheblend_rag.errors import InputError, StoreError, UnknownChunkError
from cacheblend_rag.protocol import (
    DeleteQuery,
    ModelInfo,
    PageQuery,
    read_query,
)
from cacheblend_rag.server.calling import PerNamespace, Served, calling
from cacheblend_rag.server.chunks import ConflictError, ServedChunks
from cacheblend_rag.server.middleware import error_response
from cacheblend_rag.server.openapi import (
    ChunkDetail,
    ChunkPage,
    ChunkStats,
    DeletedChunk,
    DeletedChunks,
    Flushed,
    Precomputed,
    delete_query,
    described,
    json_body,
    page_query,
)
from cacheblend_rag.store.base import stats_of

if TYPE_CHECKING:
    from cacheblend_rag.server.metrics import ReuseMetrics

_JSON = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_REFUSED_S = 0.1
"""How long a refusal for want of room takes."""
_Route = Callable[..., Awaitable[Response]]


def chunk_router(served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo) -> APIRouter:
    """Return the routes of :class:`ChunkRoutes`, with errors as responses."""
    routes = ChunkRoutes(served, metrics, model)
    router = APIRouter(prefix="/v1/chunks", tags=["chunks"])
    table: list[tuple[str, str, _Route, dict[str, Any]]] = [
        ("POST", "", routes.precompute, described(Precomputed, (409, 415, 429), json_body())),
        ("GET", "", routes.list_chunks, described(ChunkPage, (), page_query())),
        # Before /{chunk_id}: the first path that fits is taken.
        ("GET", "/stats", routes.stats, described(ChunkStats)),
        ("POST", "/flush", routes.flush, described(Flushed, (429,))),
        ("GET", "/{chunk_id:any_text}", routes.inspect, described(ChunkDetail, (404,))),
        ("DELETE", "/{chunk_id:any_text}", routes.delete, described(DeletedChunk, (404, 409))),
        ("DELETE", "", routes.delete_several, described(DeletedChunks, (409,), delete_query())),
    ]
    for method, path, route, said in table:
        router.add_api_route(path, _explained(route), methods=[method], **said)
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
    """Requests to ``/v1/chunks`` and their responses; what is done is in :class:`ServedChunks`.

    Each is about the chunks of the namespace that its key is for, and of no other.
    """

    def __init__(self, served: PerNamespace[Served], metrics: ReuseMetrics, model: ModelInfo):
        """Serve the chunks of ``served``."""
        self._served, self._metrics, self._model = served, metrics, model

    @property
    def _chunks(self) -> ServedChunks:
        return self._served.current.chunks

    async def precompute(self, request: Request) -> Response:
        """Compute and store the KV of texts, and register them; texts that are stored already cost nothing."""
        # What a page of another site sends without asking the browser's leave is of other types.
        if not _JSON.fullmatch(request.headers.get("content-type", "")):
            return error_response(
                "Send JSON, with the header 'Content-Type: application/json'.", 415, "UnsupportedMediaType"
            )
        served = self._served.current
        client = served.client
        # One at a time: who registers without end, most of all beyond a quota, takes his own time and not that of others.
        async with served.reading:
            try:
                wanted, holder = await asyncio.to_thread(served.chunks.read, await request.body())
            except StoreError:
                await asyncio.sleep(_REFUSED_S)
                raise
        report = await client.store_kv(wanted)
        self._metrics.precomputed(report, client.namespace.name)
        calling.get().admission.charge(report.tokens)
        await asyncio.to_thread(self._chunks.keep, wanted, report, holder)
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": chunk.id,
                        "object": "chunk",
                        "tokens": len(chunk.token_ids),
                        "stored": chunk.id not in report.failed,
                    }
                    for chunk in wanted
                ],
                "report": asdict(report),
            }
        )

    async def list_chunks(self, request: Request) -> Response:
        """List chunks in the order of their ids, a page at a time: ``?limit=100&after=ID``."""
        query = read_query(PageQuery, request.query_params)
        found, more = await asyncio.to_thread(self._chunks.page, query.limit, query.after)
        return JSONResponse(
            {"object": "list", "data": found, "has_more": more, "last_id": found[-1]["id"] if found else None}
        )

    async def stats(self) -> Response:
        """Say how many chunks there are, which model this is, and to the operator what the store holds."""
        served = self._served.current
        await asyncio.to_thread(served.catalogue.refresh)
        # The store is everybody's: its counters would tell one what the others do.
        seen = self._served.alone or calling.get().operator
        held = asdict(await asyncio.to_thread(stats_of, served.client.store)) if seen else None
        return JSONResponse(
            {"chunks": len(served.client.registry), "kv": held, "model": self._model.model_dump(mode="json")}
        )

    async def flush(self) -> Response:
        """Wait until the chunks that finished answers found missing have been stored."""
        await self._served.current.client.drain()
        return JSONResponse({"object": "flush", "done": True})

    async def inspect(self, chunk_id: str) -> Response:
        """Return one chunk with its text, tokens and metadata."""
        chunk = await asyncio.to_thread(self._chunks.known, chunk_id)
        described = await asyncio.to_thread(self._chunks.describe, chunk)
        detail = {"text": chunk.text, "token_ids": list(chunk.token_ids), "metadata": dict(chunk.metadata)}
        return JSONResponse({**described, **json.loads(json.dumps(detail, default=str))})

    async def delete(self, chunk_id: str) -> Response:
        """Forget a chunk and drop its KV."""
        await asyncio.to_thread(lambda: self._chunks.delete([self._chunks.known(chunk_id)]))
        return JSONResponse({"id": chunk_id, "object": "chunk", "deleted": True})

    async def delete_several(self, request: Request) -> Response:
        """Forget several chunks (``?id=…&id=…``), or all (``?all=true``); not those of the index, nor unknown ids.

        ``&holder=NAME``: for that client alone, so that what others hold stays.
        """
        query = read_query(DeleteQuery, request.query_params)
        everything = query.all
        if everything and query.holder is not None:
            raise InputError("holder goes with ?id=..., not with ?all=true, which deletes whoever holds the chunks.")
        chunk_ids = request.query_params.getlist("id")
        if not chunk_ids and not everything:
            raise InputError(
                "Name the chunks to delete, as ?id=...&id=..., or give ?all=true for every registered one."
            )
        gone = await asyncio.to_thread(self._chunks.delete_named, chunk_ids, everything, query.holder)
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "chunk", "deleted": True} for name in gone]}
        )


def _explained(route: _Route) -> _Route:
    """Turn the library's errors into responses: 404, 409, 422, and 507 for a store that cannot be written."""

    @wraps(route)
    async def run(*args: Any, **kwargs: Any) -> Response:
        try:
            return await route(*args, **kwargs)
        except UnknownChunkError as error:
            return error_response(str(error), 404, "NotFoundError", "id")
        except ConflictError as error:
            return error_response(str(error), 409, "ConflictError", "id")
        except InputError as error:
            return error_response(str(error), 422, "UnprocessableEntityError")
        except StoreError as error:
            return error_response(str(error), 507, "StoreError")

    return run
