"""Defines the request options and chunk bodies that client and server exchange in addition to OpenAI's own fields.

:class:`~cacheblend_rag.blending.outcome.PromptOutcome` defines the additional fields of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import checked_id

TOKENIZER_PROBE = "Ships' logs: 1911, naïve café — 東京 🙂\n\n\tif x != y:  return  # end\n<|im_end|></s>"
"""Text that both client and server encode. Equal token ids mean that client and server use the same tokenizer."""

UNKNOWN_CHUNK = "UnknownChunkError"
"""Type, in the body of a server's error, of a request that names an unknown chunk."""

MAX_TEXTS = 4096
MAX_HOLDER = 200
MAX_METADATA = 1 << 16  # bytes of one chunk's metadata as JSON; no quota counts metadata


class StrictModel(BaseModel):
    """Refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


ChunkId = Annotated[str, AfterValidator(checked_id)]


class SpanBody(StrictModel):
    """Places a chunk in a prompt of token ids: positions ``start`` (inclusive) to ``end`` (exclusive).

    The server uses ``text`` to store a chunk that is not registered yet, if the id is the content hash of ``text``.
    """

    id: ChunkId = Field(min_length=1, max_length=512)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    text: str | None = None


class NamedChunks(StrictModel):
    """Lists the chunks that a request names, and their positions.

    Attributes:
        chunk_ids: Ids of registered chunks. The server inserts each chunk whose text is not in the prompt before the
            last user
            message (chat) or before the prompt (completions), in this order.
        spans: Positions of the chunks in a prompt of token ids.
    """

    chunk_ids: tuple[ChunkId, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    spans: tuple[SpanBody, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)


@dataclass(frozen=True)
class RequestOptions:
    """Holds the optional fields of a request that OpenAI's API does not have: blend settings and :class:`NamedChunks`.

    ``chunk_ids`` has no duplicates.
    """

    settings: BlendSettings
    chunk_ids: tuple[str, ...]
    spans: tuple[SpanBody, ...]


def read_options(extra: Mapping[str, Any] | None) -> RequestOptions:
    """Read ``cacheblend`` and ``chunk_ids`` from the fields of a request that OpenAI's API does not have.

    Raises:
        InputError: A field cannot be read. The message names the field.
    """
    extra = extra or {}
    given = extra.get("cacheblend") or {}
    if not isinstance(given, Mapping):
        raise InputError("cacheblend: give an object of options.")
    named = {name: value for name, value in given.items() if name in NamedChunks.model_fields}
    if extra.get("chunk_ids") is not None:
        if named.get("chunk_ids"):
            raise InputError("chunk_ids stands both beside and inside cacheblend; give it once.")
        named["chunk_ids"] = extra["chunk_ids"]
    try:
        chunks = NamedChunks.model_validate(named)
        settings = BlendSettings.from_params({name: value for name, value in given.items() if name not in named})
    except ValidationError as error:
        raise InputError(f"cacheblend: {first_problem(error)}") from None
    except InputError as error:
        raise InputError(f"cacheblend: {error}") from None
    return RequestOptions(settings, tuple(dict.fromkeys(chunks.chunk_ids)), chunks.spans)


def first_problem(error: ValidationError) -> str:
    """Return the first validation error as one line, with the field's name and without its value."""
    detail = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else str(detail["msg"])


class ChunkBody(StrictModel):
    """Holds the text of one chunk. The server derives a missing ``id`` or missing ``token_ids`` from the text."""

    text: str = Field(min_length=1)
    id: str | None = Field(default=None, min_length=1, max_length=512)
    token_ids: tuple[int, ...] | None = Field(default=None, min_length=1, fail_fast=True)
    metadata: dict[str, Any] = Field(default_factory=dict)


class PrecomputeBody(StrictModel):
    """Holds the body of ``POST /v1/chunks``: ``texts`` or ``chunks``, and the ``holder`` to register the chunks for."""

    texts: tuple[str, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    chunks: tuple[ChunkBody, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    holder: str = Field(default="", max_length=MAX_HOLDER)


class PageQuery(BaseModel):
    """Holds the query of ``GET /v1/chunks``: at most ``limit`` chunks, with ids after ``after``."""

    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = None


class DeleteQuery(BaseModel):
    """Holds the query of ``DELETE /v1/chunks`` without the parameter ``id``.

    Attributes:
        all: Whether to delete every registered chunk.
        holder: Client that releases the chunks; the server retains chunks that other holders have registered. Without a
            holder
            the server deletes the chunks, whoever holds them.
    """

    all: bool = False
    holder: str | None = Field(default=None, max_length=MAX_HOLDER)


Q = TypeVar("Q", bound=BaseModel)


def read_query(model: type[Q], query: Mapping[str, str]) -> Q:
    """Read the query of a request into ``model``.

    Raises:
        InputError: A value is not allowed.
    """
    try:
        return model.model_validate(dict(query))
    except ValidationError as error:
        raise InputError(first_problem(error)) from None


class ModelInfo(BaseModel):
    """Describes the model to a client: the ``model`` field of ``GET /v1/chunks/stats``.

    Attributes:
        name: Name that the server's operator gave to the model.
        served_as: Names of the model in requests; the first is the usual name.
        fingerprint: Identity of weights and dtype.
        tokenizer: Directory, hub name, or a name that this package defines: ``"bundled"``, ``"smollm2"``.
        tokenizer_probe: Token ids of :data:`TOKENIZER_PROBE`, special tokens parsed.
        header_ids: Tokens in front of every chunk when the KV of the chunk is computed.
        context_window: Most tokens of prompt and completion together.
        blended: Whether the model passed the parity gate.
        reason: Reason why the model did not pass the parity gate.
        num_layers: Number of transformer layers.
        profile: Defaults of the blend options that a request does not set, without calibration results.
        controlled: Whether costs were measured, so that a loading controller can choose the ratio for ``"auto"``.
    """

    name: str
    served_as: tuple[str, ...]
    fingerprint: str
    tokenizer: str
    tokenizer_probe: tuple[int, ...]
    header_ids: tuple[int, ...]
    context_window: int
    blended: bool
    reason: str = ""
    num_layers: int
    profile: ModelProfile
    controlled: bool = False
