"""Defines what goes over the wire beside OpenAI's own fields: request options and chunk bodies.

What is reported of an answer is :class:`~cacheblend_rag.blending.outcome.PromptOutcome`.
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
"""Client and server encode this text; equal token ids mean that they use the same tokenizer."""

MAX_TEXTS = 4096
MAX_HOLDER = 200
MAX_METADATA = 1 << 16  # bytes of one chunk's as JSON: they count in no quota


class StrictModel(BaseModel):
    """Refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid")


ChunkId = Annotated[str, AfterValidator(checked_id)]


class SpanBody(StrictModel):
    """A chunk in a prompt of token ids: positions ``start`` (inclusive) to ``end`` (exclusive).

    ``text`` lets the server store the chunk if it has never seen it, and the id is that of the text.
    """

    id: ChunkId = Field(min_length=1, max_length=512)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    text: str | None = None


class NamedChunks(StrictModel):
    """Says which chunks a request names, and where they stand.

    Attributes:
        chunk_ids: Registered chunks. Those whose text does not stand in the prompt are put in front of the last user message
            (chat) or of the prompt (completions), in this order.
        spans: For a prompt of token ids: where its chunks stand.
    """

    chunk_ids: tuple[ChunkId, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    spans: tuple[SpanBody, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)


@dataclass(frozen=True)
class RequestOptions:
    """Holds what a request asks for beside OpenAI's fields, all of it optional: blend options, and what :class:`NamedChunks` has.

    Each of ``chunk_ids`` is there once.
    """

    settings: BlendSettings
    chunk_ids: tuple[str, ...]
    spans: tuple[SpanBody, ...]


def read_options(extra: Mapping[str, Any] | None) -> RequestOptions:
    """Read ``cacheblend`` and ``chunk_ids`` from the fields of a request that OpenAI's API does not have.

    Raises:
        InputError: They cannot be read; the message names the field.
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
    """Return the first thing wrong with a body, in one line, without its value."""
    detail = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else str(detail["msg"])


class ChunkBody(StrictModel):
    """A text that is already cut. Without ``id`` and ``token_ids`` they are made from the text."""

    text: str = Field(min_length=1)
    id: str | None = Field(default=None, min_length=1, max_length=512)
    token_ids: tuple[int, ...] | None = Field(default=None, min_length=1, fail_fast=True)
    metadata: dict[str, Any] = Field(default_factory=dict)


class PrecomputeBody(StrictModel):
    """The body of ``POST /v1/chunks``: ``texts`` or ``chunks``, and the ``holder`` that they are registered for."""

    texts: tuple[str, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    chunks: tuple[ChunkBody, ...] = Field(default=(), max_length=MAX_TEXTS, fail_fast=True)
    holder: str = Field(default="", max_length=MAX_HOLDER)


class PageQuery(BaseModel):
    """The query of ``GET /v1/chunks``: how many chunks, behind which id."""

    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = None


class DeleteQuery(BaseModel):
    """The query of ``DELETE /v1/chunks``, besides ``id``.

    Attributes:
        all: Whether every registered chunk is meant.
        holder: Who lets go of the chunks, which stay where others hold them; without it they go, whoever holds them.
    """

    all: bool = False
    holder: str | None = Field(default=None, max_length=MAX_HOLDER)


Q = TypeVar("Q", bound=BaseModel)


def read_query(model: type[Q], query: Mapping[str, str]) -> Q:
    """Read the query of a request.

    Raises:
        InputError: A value that is not allowed.
    """
    try:
        return model.model_validate(dict(query))
    except ValidationError as error:
        raise InputError(first_problem(error)) from None


class ModelInfo(BaseModel):
    """Tells a client what it must know of the model: the ``model`` field of ``GET /v1/chunks/stats``.

    Attributes:
        name: What the server's operator called it.
        served_as: Names it answers to in requests; the first is the usual one.
        fingerprint: Identity of weights and dtype.
        tokenizer: Directory, hub name, or a name of this package's: ``"bundled"``, ``"smollm2"``.
        tokenizer_probe: Token ids of :data:`TOKENIZER_PROBE`, special tokens parsed.
        header_ids: Tokens in front of every chunk when its KV is computed.
        context_window: Most tokens of prompt and completion together.
        blended: Whether the model passed the parity gate.
        reason: Why not.
        num_layers: Number of transformer layers.
        profile: The blend options that a request leaves open; without what calibration has measured.
        controlled: Whether there is a loading controller to choose a ratio of ``"auto"``: costs that were measured.
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
