"""What the chat model and the text LLM share: their fields, a call's parameters, and what a call reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Chunk,
    Generation,
    InputError,
    PromptTooLongError,
    Reuse,
    SamplingParams,
    encoder_for,
)
from langchain_cacheblend.uses import uses_of

DEFAULT_MAX_TOKENS = 512

_SAMPLING = ("temperature", "max_tokens", "top_p", "seed")
_SETTINGS = ("ratio", "policy", "check_layers", "reuse")
# Passed by LangChain to every provider; they ask for nothing that a model run in-process could do otherwise.
_IGNORED = {"strict", "parallel_tool_calls", "stream", "streaming"}
# LangChain's standard parameters for models behind a network; here there is nothing to time out, retry or log in to.
_OF_OTHER_MODELS = {"timeout", "max_retries", "api_key", "base_url"}


class PromptTooLong(PromptTooLongError, ContextOverflowError):  # noqa: N818 - named like its base
    """The prompt exceeds the context window, in the terms of both libraries (LangChain's middleware catches its own)."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Turn a prompt that is too long into the error LangChain looks for."""
    try:
        yield
    except PromptTooLongError as error:
        raise PromptTooLong(str(error)) from error


@dataclass(frozen=True)
class Request:
    """One call of an engine.

    Attributes:
        prompt: Text and chunks; no references are left. A string where no chunk was found: an engine that is a client may yet
            find some, in the registry of its server.
        chunks: The chunks in it, by id.
    """

    prompt: BlendPrompt | str
    sampling: SamplingParams
    settings: BlendSettings
    chunks: Mapping[str, Chunk]


class EngineFields(BaseModel):
    """The fields of both models. Each but ``engine`` may be given per call, too: ``llm.invoke(x, ratio=0.3)``.

    Attributes:
        engine: The model. It is held, not owned: close it yourself. Never serialised, printed or traced.
        temperature: 0 is greedy.
        max_tokens: Most tokens to generate; exceeding the context window with it is an error. None takes 512, or what the
            window leaves.
        top_p: Nucleus mass in (0, 1].
        seed: Makes sampling repeatable.
        stop: Strings that end the answer; they are not part of it.
        ratio: Recompute ratio in [0, 1]; None takes the engine's.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured; None takes the model profile's.
        reuse: ``"chunks"``, ``"prefix"`` or ``"off"`` (full prefill).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: BlendEngine = Field(exclude=True, repr=False)
    temperature: float = 0.0
    max_tokens: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    ratio: float | None = None
    policy: str = "hkvd"
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse = "chunks"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """Refuse misspelt fields: pydantic would drop them, and the model would answer with other settings than asked."""
        names = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        if isinstance(values, Mapping) and (unknown := sorted(set(values) - names - _OF_OTHER_MODELS)):
            fields = ", ".join(sorted(EngineFields.model_fields))
            raise InputError(f"{cls.__name__} has no field {unknown[0]!r}; it has {fields}.")
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse values outside their range when the model is made, not at its first call."""
        self.sampling(None, {}, 1 if self.max_tokens is None else self.max_tokens)
        self.blend_settings({})
        return self

    @property
    def model_name(self) -> str:
        """What the user called the engine's model."""
        return self.engine.fingerprint.name

    def identity(self) -> dict[str, Any]:
        """Return what decides the answer: the key of LangChain's LLM cache, and what tracers see."""
        names = (*_SAMPLING, "stop", *_SETTINGS)
        fields = {name: getattr(self, name) for name in names}
        return {"model_name": self.model_name, "fingerprint": self.engine.fingerprint.digest, **fields}

    def sampling(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any], max_tokens: int) -> SamplingParams:
        """Return how to decode: per-call values before fields."""
        given = {name: kwargs.get(name, getattr(self, name)) for name in _SAMPLING if name != "max_tokens"}
        stops = tuple(stop if stop is not None else self.stop or ())
        return SamplingParams(max_tokens=max_tokens, stop=stops, json_schema=kwargs.get("json_schema"), **given)

    def blend_settings(self, kwargs: Mapping[str, Any]) -> BlendSettings:
        """Return how to treat stored KV: per-call values before fields."""
        return BlendSettings(**{name: kwargs.get(name, getattr(self, name)) for name in _SETTINGS})

    def request(
        self, prompt: BlendPrompt, stop: Sequence[str] | None, kwargs: Mapping[str, Any], known: Sequence[str] = ()
    ) -> Request:
        """Return the engine call for a resolved prompt.

        Args:
            prompt: The prompt.
            stop: Stop strings of this call; None takes the field's.
            kwargs: The other arguments of this call.
            known: Names in ``kwargs`` that the caller has dealt with.

        Raises:
            InputError: An argument that nothing reads, a value out of range, or another model than the engine's.
        """
        allowed = {*_SAMPLING, *_SETTINGS, *_IGNORED, *known, "json_schema", "model"}
        if unknown := sorted(set(kwargs) - allowed):
            raise InputError(
                f"Unknown argument {unknown[0]!r}; this model takes {', '.join(sorted(allowed - _IGNORED))}."
            )
        if kwargs.get("model", self.model_name) != self.model_name:
            raise InputError(
                f"This engine runs {self.model_name!r} and cannot answer as {kwargs['model']!r}; make an engine for it."
            )
        chunks = {segment.id: segment for segment in prompt.segments if isinstance(segment, Chunk)}
        uses_of(self.engine).introduce(chunks.values(), self.engine)
        max_tokens = kwargs.get("max_tokens", self.max_tokens)
        if max_tokens is None:
            room = self.engine.context_window - self.count(prompt)
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room))
        sent = prompt if chunks else "".join(s for s in prompt.segments if isinstance(s, str))
        return Request(sent, self.sampling(stop, kwargs, max_tokens), self.blend_settings(kwargs), chunks)

    def count(self, prompt: BlendPrompt) -> int:
        """Return the number of tokens the model sees for ``prompt``."""
        return len(self.engine.tokenize(prompt).token_ids)

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of plain text, without any that a template adds."""
        return encoder_for(self.engine.tokenizer).document(text)

    def answer_metadata(self, done: Generation) -> dict[str, Any]:
        """Return the response metadata of an answer: which model, why it ended, how its KV came about."""
        return {
            "model_name": self.model_name,
            "finish_reason": done.finish_reason,
            "cacheblend": {
                "mode": done.mode,
                "reason": done.reason,
                "missing": list(done.missing),
                "usage": asdict(done.usage),
                "timings": asdict(done.timings),
            },
        }


def usage_metadata(done: Generation, request: Request) -> UsageMetadata:
    """Return the token counts of an answer. The input details are disjoint and add up to at most ``input_tokens``.

    ``cache_read``: stored KV used as it is. ``recomputed``: had stored KV, and the selection policy chose to recompute it.
    ``cache_creation``: tokens of chunks without stored KV, computed in place and handed to the store for the next prompt.
    """
    usage = done.usage
    missing = [request.chunks[chunk_id] for chunk_id in set(done.missing) if chunk_id in request.chunks]
    details: dict[str, int] = {
        "cache_read": usage.reused_tokens,
        "cache_creation": sum(len(chunk.token_ids) for chunk in missing),
        "recomputed": usage.recomputed_tokens,
    }
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )
