"""``/v1/chunks``: precompute, list, inspect and delete chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from cacheblend_rag.chunking import Chunk, make_chunk
from cacheblend_rag.errors import InputError, StoreError, UnknownChunkError
from cacheblend_rag.kv import KVKey
from cacheblend_rag.server.middleware import error_response
from cacheblend_rag.server.naming import tokens_match
from cacheblend_rag.server.protocol import (
    ChunkBody,
    DeleteQuery,
    ModelInfo,
    PageQuery,
    PrecomputeBody,
    first_problem,
    read_query,
)
from cacheblend_rag.server.stored import StoredChunks
from cacheblend_rag.store import EntryInfo

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.server.catalogue import ChunkCatalogue
    from cacheblend_rag.server.metrics import ReuseMetrics

_Route = Callable[..., Awaitable[Response]]


class ConflictError(InputError):
    """A chunk that cannot be changed that way."""


def chunk_router(client: BlendClient, catalogue: ChunkCatalogue, metrics: ReuseMetrics, model: ModelInfo) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/chunks", tags=["chunks"])
    chunks = _Chunks(client, catalogue)

    @router.post("")
    @_explained
    async def precompute(request: Request) -> Response:
        """Compute and store the KV of texts, and register them; texts that are stored already cost nothing."""
        wanted = await asyncio.to_thread(chunks.read, await request.body())
        report = await client.precompute(wanted)
        metrics.precomputed(report)
        await asyncio.to_thread(catalogue.add, list({chunk.id: chunk for chunk in wanted}.values()))
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

    @router.get("")
    @_explained
    async def list_chunks(request: Request) -> Response:
        """List chunks in the order of their ids, a page at a time: ``?limit=100&after=ID``."""
        query = read_query(PageQuery, request.query_params)
        found, more = await asyncio.to_thread(chunks.page, query.limit, query.after)
        return JSONResponse(
            {"object": "list", "data": found, "has_more": more, "last_id": found[-1]["id"] if found else None}
        )

    @router.get("/stats")
    @_explained
    async def stats() -> Response:
        """Say what the store holds, how many chunks are known, and which model this is."""
        await asyncio.to_thread(catalogue.refresh)
        held = await asyncio.to_thread(client.store.stats)
        return JSONResponse(
            {"chunks": len(client.registry), "kv": asdict(held), "model": model.model_dump(mode="json")}
        )

    @router.post("/flush")
    @_explained
    async def flush() -> Response:
        """Wait until the chunks that finished answers found missing have been stored."""
        await client.drain()
        return JSONResponse({"object": "flush", "done": True})

    @router.get("/{chunk_id}")
    @_explained
    async def inspect(chunk_id: str) -> Response:
        """Return one chunk with its text, tokens and metadata."""
        chunk = await asyncio.to_thread(chunks.known, chunk_id)
        entries = await asyncio.to_thread(chunks.stored.listing)
        detail = {"text": chunk.text, "token_ids": list(chunk.token_ids), "metadata": dict(chunk.metadata)}
        return JSONResponse({**chunks.describe(chunk, entries), **json.loads(json.dumps(detail, default=str))})

    @router.delete("/{chunk_id}")
    @_explained
    async def delete(chunk_id: str) -> Response:
        """Forget a chunk and drop its KV."""
        await asyncio.to_thread(lambda: chunks.delete([chunks.known(chunk_id)]))
        return JSONResponse({"id": chunk_id, "object": "chunk", "deleted": True})

    @router.delete("")
    @_explained
    async def delete_several(request: Request) -> Response:
        """Forget several chunks (``?id=…&id=…``), or all (``?all=true``); not those of the index, nor unknown ids."""
        everything = read_query(DeleteQuery, request.query_params).all
        chunk_ids = request.query_params.getlist("id")
        if not chunk_ids and not everything:
            raise InputError(
                "Name the chunks to delete, as ?id=...&id=..., or give ?all=true for every registered one."
            )
        gone = await asyncio.to_thread(chunks.delete_named, chunk_ids, everything)
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "chunk", "deleted": True} for name in gone]}
        )

    return router


class _Chunks:
    """What the routes do, without HTTP. Blocking; called off the event loop."""

    def __init__(self, client: BlendClient, catalogue: ChunkCatalogue):
        self._client, self._catalogue, self.stored = client, catalogue, StoredChunks(client)

    def read(self, body: bytes) -> list[Chunk]:
        """Make chunks of a request's body.

        Raises:
            InputError: It is malformed, or holds what cannot be a chunk.
        """
        try:
            parsed = PrecomputeBody.model_validate_json(body)
        except ValidationError as error:
            raise InputError(first_problem(error)) from None
        if bool(parsed.texts) == bool(parsed.chunks):
            raise InputError(
                'Give {"texts": ["...", ...]}, or {"chunks": [{"text": "..."}, ...]}; one of them, not empty.'
            )
        self._catalogue.refresh()
        # Not validated: an empty text is refused below, with its number.
        bodies = parsed.chunks or tuple(ChunkBody.model_construct(text=text) for text in parsed.texts)
        found: list[Chunk] = []
        for number, piece in enumerate(bodies):
            try:
                found.append(self._chunk(piece))
            except ConflictError:
                raise
            except InputError as error:
                raise InputError(f"{'chunks' if parsed.chunks else 'texts'}.{number}: {error}") from error
        return found

    def _chunk(self, body: ChunkBody) -> Chunk:
        chunk = make_chunk(body.text, self._client.tokenizer, body.metadata)
        if body.token_ids is not None and not tokens_match(self._client.tokenizer, body.text, body.token_ids):
            raise InputError(
                "token_ids are not those of this text in the server's tokenizer; cut chunks with that tokenizer, or leave "
                "token_ids out."
            )
        room = self._client.context_window - len(self._client.header_ids) - 1
        if len(chunk.token_ids) > room:
            raise InputError(
                f"it has {len(chunk.token_ids)} tokens; the context window leaves room for {room}. Split it."
            )
        if body.id is None or body.id == chunk.id:
            return chunk
        known = self._client.registry.get(body.id)
        if known is not None and known.text != chunk.text:
            raise ConflictError(
                f"The id {body.id!r} belongs to another text. Delete that chunk first, or use another id."
            )
        return Chunk(body.id, chunk.text, chunk.token_ids, chunk.metadata)

    def known(self, chunk_id: str) -> Chunk:
        self._catalogue.refresh()
        chunk = self._client.registry.get(chunk_id)
        if chunk is None:
            raise UnknownChunkError(f"No chunk has the id {chunk_id!r}.")
        return chunk

    def page(self, limit: int, after: str | None) -> tuple[list[dict[str, Any]], bool]:
        self._catalogue.refresh()
        ordered = sorted(self._client.registry, key=lambda chunk: chunk.id)
        rest = [chunk for chunk in ordered if after is None or chunk.id > after]
        entries = self.stored.listing()
        return [self.describe(chunk, entries) for chunk in rest[:limit]], len(rest) > limit

    def describe(self, chunk: Chunk, listing: dict[KVKey, EntryInfo]) -> dict[str, Any]:
        found = self.stored.found(chunk, listing)
        return {
            "id": chunk.id,
            "object": "chunk",
            "tokens": len(chunk.token_ids),
            "origin": self._catalogue.origin(chunk.id) or "prompt",
            "source": str(chunk.metadata.get("source", "")),
            "stored": self.stored.contains(chunk),
            "bytes": sum(entry.nbytes for entry in found) if found else None,
            "last_used": max(entry.last_used for entry in found) if found else None,
        }

    def delete(self, wanted: list[Chunk]) -> None:
        kept = [chunk for chunk in wanted if self._catalogue.origin(chunk.id) == "index"]
        if kept:
            raise ConflictError(
                f"The chunk {kept[0].id} is part of the index in the server's store; change that with `cacheblend index`. "
                "Its KV alone is dropped by `cacheblend store rm`."
            )
        self._catalogue.remove([chunk.id for chunk in wanted])
        for chunk in wanted:
            self.stored.drop(chunk)

    def delete_named(self, names: list[str], everything: bool) -> list[str]:
        self._catalogue.refresh(force=True)
        named = list(self._client.registry) if everything else map(self._client.registry.get, names)
        wanted = [chunk for chunk in named if chunk is not None and self._catalogue.origin(chunk.id) != "index"]
        self.delete(wanted)
        return [chunk.id for chunk in wanted]


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
