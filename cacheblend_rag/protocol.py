"""What goes over the wire beside OpenAI's own fields: request options, chunk bodies, reports of reuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import BlendSettings, Reuse
from cacheblend_rag.errors import InputError

TOKENIZER_PROBE = "Ships' logs: 1911, naïve café — 東京 🙂\n\n\tif x != y:  return  # end\n<|im_end|></s>"
"""Client and server encode this text; equal token ids mean that they use the same tokenizer."""

MAX_TEXTS = 4096
_STRICT = ConfigDict(extra="forbid")


class SpanBody(BaseModel):
    """A chunk in a prompt of token ids: positions ``start`` (inclusive) to ``end`` (exclusive).

    ``text`` lets the server store the chunk if it has never seen it.
    """

    model_config = _STRICT

    id: str = Field(min_length=1, max_length=512)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    text: str | None = None


class BlendOptions(BaseModel):
    """The ``cacheblend`` field of a completion request. All of it is optional.

    Attributes:
        ratio: Recompute ratio; the server's default if missing.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured.
        reuse: ``"chunks"``, ``"prefix"`` or ``"nothing"``.
        chunk_ids: Registered chunks. Those whose text does not stand in the prompt are put in front of the last user message
            (chat) or of the prompt (completions), in this order.
        spans: For a prompt of token ids: where its chunks stand.
    """

    model_config = _STRICT

    ratio: float | None = None
    policy: str = "hkvd"
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse = "chunks"
    chunk_ids: tuple[str, ...] = Field(default=(), max_length=MAX_TEXTS)
    spans: tuple[SpanBody, ...] = Field(default=(), max_length=MAX_TEXTS)

    def settings(self) -> BlendSettings:
        """Return the settings.

        Raises:
            InputError: A value out of range, or an unknown policy.
        """
        policy(self.policy)
        layers = self.check_layers
        if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < 1):
            raise InputError(f"check_layers is {list(layers)}; give ascending layers from 1 on.")
        return BlendSettings(self.ratio, self.policy, layers, self.reuse)


def read_options(extra: Mapping[str, Any] | None) -> BlendOptions:
    """Read ``cacheblend`` and ``chunk_ids`` from the fields of a request that OpenAI's API does not have.

    Raises:
        InputError: They cannot be read; the message names the field.
    """
    extra = extra or {}
    given = extra.get("cacheblend")
    try:
        options = BlendOptions() if given is None else BlendOptions.model_validate(given)
        if extra.get("chunk_ids") is not None:
            if options.chunk_ids:
                raise InputError("chunk_ids stands both beside and inside cacheblend; give it once.")
            merged = {**options.model_dump(exclude_unset=True), "chunk_ids": extra["chunk_ids"]}
            options = BlendOptions.model_validate(merged)
    except ValidationError as error:
        raise InputError(f"cacheblend: {first_problem(error)}") from None
    options.settings()
    return options


def first_problem(error: ValidationError) -> str:
    """Return the first thing wrong with a body, in one line, without its value."""
    detail = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else str(detail["msg"])


class ChunkBody(BaseModel):
    """A text that is already cut. Without ``id`` and ``token_ids`` they are made from the text."""

    model_config = _STRICT

    text: str = Field(min_length=1)
    id: str | None = Field(default=None, min_length=1, max_length=512)
    token_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


class PrecomputeBody(BaseModel):
    """The body of ``POST /v1/chunks``: ``texts`` or ``chunks``."""

    model_config = _STRICT

    texts: tuple[str, ...] = Field(default=(), max_length=MAX_TEXTS)
    chunks: tuple[ChunkBody, ...] = Field(default=(), max_length=MAX_TEXTS)


class PageQuery(BaseModel):
    """The query of ``GET /v1/chunks``: how many chunks, behind which id."""

    limit: int = Field(default=100, ge=1, le=1000)
    after: str | None = None


class DeleteQuery(BaseModel):
    """The query of ``DELETE /v1/chunks``, besides ``id``: whether every registered chunk is meant."""

    all: bool = False


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
    """What a client must know of the model: the ``model`` field of ``GET /v1/chunks/stats``.

    Attributes:
        name: What the server's operator called it.
        served_as: Names it answers to in requests; the first is the usual one.
        fingerprint: Identity of weights and dtype.
        tokenizer: Directory or hub name; ``"bundled"`` for the model that ships with the package.
        tokenizer_probe: Token ids of :data:`TOKENIZER_PROBE`, special tokens parsed.
        header_ids: Tokens in front of every chunk when its KV is computed.
        context_window: Most tokens of prompt and completion together.
        blended: Whether the model passed the parity gate.
        reason: Why not.
        ratio: Default recompute ratio.
        check_layers: Default check layers.
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
    ratio: float
    check_layers: tuple[int, ...]


class ReuseReport(BaseModel):
    """How a prompt was handled: the ``cacheblend`` field of ``usage``. Tokens and seconds of one prompt.

    Attributes:
        mode: ``"blend"`` or ``"prefill"``.
        reason: Why, in words.
        reused_tokens: Prompt tokens whose stored KV was used as it is.
        recomputed_tokens: Tokens with stored KV that were recomputed.
        computed_tokens: Prompt tokens that went through all layers.
        missing: Ids of chunks without stored KV, computed in place.
        load_s: Time the computation waited for stored KV.
        blend_s: Time of placement and both passes.
        loaded_bytes: Stored KV read.
        fingerprint: Identity of the model that answered.
    """

    mode: Literal["blend", "prefill"]
    reason: str
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    missing: tuple[str, ...] = ()
    load_s: float = 0.0
    blend_s: float = 0.0
    loaded_bytes: int = 0
    fingerprint: str = ""
