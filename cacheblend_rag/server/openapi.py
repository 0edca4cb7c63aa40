"""Describes ``/v1/chunks`` for ``/openapi.json`` and ``/docs``: bodies, queries, answers and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.protocol import DeleteQuery, ModelInfo, PageQuery, PrecomputeBody
from cacheblend_rag.store import StoreStats

_WHOLE = ConfigDict(extra="forbid")


class StoredChunk(BaseModel):
    """A chunk that was sent, and whether its KV is stored now."""

    model_config = _WHOLE

    id: str
    object: Literal["chunk"]
    tokens: int
    stored: bool


class Precomputed(BaseModel):
    """The answer of ``POST /v1/chunks``."""

    model_config = _WHOLE

    object: Literal["list"]
    data: list[StoredChunk]
    report: PrecomputeReport


class ListedChunk(BaseModel):
    """A chunk as a listing shows it; the size of its KV in bytes, its last use in seconds since the epoch."""

    model_config = _WHOLE

    id: str
    object: Literal["chunk"]
    tokens: int
    origin: str
    source: str
    stored: bool
    bytes: int | None
    last_used: float | None


class ChunkPage(BaseModel):
    """The answer of ``GET /v1/chunks``."""

    model_config = _WHOLE

    object: Literal["list"]
    data: list[ListedChunk]
    has_more: bool
    last_id: str | None


class ChunkDetail(ListedChunk):
    """The answer of ``GET /v1/chunks/{id}``."""

    text: str
    token_ids: list[int]
    metadata: dict[str, Any]


class DeletedChunk(BaseModel):
    """A chunk that is gone."""

    model_config = _WHOLE

    id: str
    object: Literal["chunk"]
    deleted: Literal[True]


class DeletedChunks(BaseModel):
    """The answer of ``DELETE /v1/chunks``."""

    model_config = _WHOLE

    object: Literal["list"]
    data: list[DeletedChunk]


class ChunkStats(BaseModel):
    """The answer of ``GET /v1/chunks/stats``; what the store holds is the operator's to see."""

    model_config = _WHOLE

    chunks: int
    kv: StoreStats | None
    model: ModelInfo


class Flushed(BaseModel):
    """The answer of ``POST /v1/chunks/flush``."""

    model_config = _WHOLE

    object: Literal["flush"]
    done: Literal[True]


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
        "response_model": None,  # answers are made by the routes
        "responses": {
            200: {"model": answer},
            **{status: {"model": ErrorBody, "description": text} for status, text in refusals.items()},
        },
        "openapi_extra": extra or {},
    }


def json_body() -> dict[str, Any]:
    """Return the request of ``POST /v1/chunks``, which the route reads by itself."""
    schema = _inlined(PrecomputeBody.model_json_schema())
    for name in _TEXTS:
        schema["properties"][name]["minItems"] = 1
    schema["oneOf"] = [{"required": [name]} for name in _TEXTS]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def page_query() -> dict[str, Any]:
    """Return the query of ``GET /v1/chunks``."""
    return {"parameters": _parameters(PageQuery)}


def delete_query() -> dict[str, Any]:
    """Return the query of ``DELETE /v1/chunks``."""
    ids = {"name": "id", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}, "explode": True}
    return {"parameters": [ids, *_parameters(DeleteQuery)]}


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
