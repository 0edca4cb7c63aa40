"""What the chat model and the text LLM share: their fields, a call's parameters, and what a call reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import asdict, fields, replace
from typing import Any, Literal, Self, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Generation,
    InputError,
    PromptTooLongError,
    Request,
    Reuse,
    SamplingParams,
    encoder_for,
)
from langchain_cacheblend.uses import uses_of

DEFAULT_MAX_TOKENS = 512

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")
_BLEND = tuple(option.name for option in fields(BlendSettings))
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


class EngineFields(BaseModel):
    """The fields of both models. Each but ``engine`` may be given per call, too: ``llm.invoke(x, ratio=0.3)``.

    Attributes:
        engine: The model. It is held, not owned: close it yourself. Never serialised, printed or traced.
        max_tokens: Most tokens to generate; exceeding the context window with it is an error. None takes 512, or what the
            window leaves.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        seed: Makes sampling repeatable.
        stop: Strings that end the answer; they are not part of it.
        ratio: Recompute ratio in [0, 1], or ``"auto"``: the model profile's, and more for text unlike that of its calibration.
            None takes the profile's, as with the next three.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        reuse: ``"chunks"``, ``"prefix"`` or ``"off"`` (full prefill).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: BlendEngine = Field(exclude=True, repr=False)
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    ratio: float | Literal["auto"] | None = None
    policy: str | None = None
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """Refuse misspelt fields: pydantic would drop them, and the model would answer with other settings than asked."""
        if not isinstance(values, Mapping):
            return values
        names = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        if unknown := sorted(set(values) - names - _OF_OTHER_MODELS):
            known = ", ".join(sorted(EngineFields.model_fields))
            raise InputError(f"{cls.__name__} has no field {unknown[0]!r}; it has {known}.")
        # Before pydantic coerces the values: what is wrong is said as in a call.
        _blend_settings(values)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse values outside their range when the model is made, not at its first call."""
        _sampling(self._options(), room=1)
        return self

    @property
    def model_name(self) -> str:
        """What the user called the engine's model."""
        return self.engine.fingerprint.name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides the answer: the key of LangChain's LLM cache, and what tracers see."""
        return {"model_name": self.model_name, "fingerprint": self.engine.fingerprint.digest, **self._options()}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own tokens of ``text``, without any that a template adds."""
        return encoder_for(self.engine.tokenizer).document(text)

    def _options(self) -> dict[str, Any]:
        """Return the fields that a call may give, too."""
        return {name: getattr(self, name) for name in (*_SAMPLING, *_BLEND)}

    def request(
        self, prompt: BlendPrompt, stop: Sequence[str] | None, kwargs: Mapping[str, Any], known: Sequence[str] = ()
    ) -> Request:
        """Return the engine call for a prompt, which is tokenised here and nowhere else.

        Args:
            prompt: The prompt.
            stop: Stop strings of this call; None takes the field's.
            kwargs: The other arguments of this call; they go before the fields.
            known: Names in ``kwargs`` that the caller has dealt with.

        Raises:
            InputError: An argument that nothing reads, a value out of range, or another model than the engine's.
            PromptTooLongError: Prompt and answer exceed the context window.
        """
        allowed = {*_SAMPLING, *_BLEND, *_IGNORED, *known, "json_schema", "model"}
        if unknown := sorted(set(kwargs) - allowed):
            raise InputError(
                f"Unknown argument {unknown[0]!r}; this model takes {', '.join(sorted(allowed - _IGNORED))}."
            )
        if kwargs.get("model", self.model_name) != self.model_name:
            raise InputError(
                f"This engine runs {self.model_name!r} and cannot answer as {kwargs['model']!r}; make an engine for it."
            )
        options = {**self._options(), **kwargs}
        if stop is not None:
            options["stop"] = stop
        settings = _blend_settings(options)
        tokens = self.engine.tokenize(prompt)
        if not tokens.spans:
            # An engine that is a client may yet find chunks in the text, in the registry of its server.
            tokens = replace(tokens, text="".join(s for s in prompt.segments if isinstance(s, str)))
        room = self.engine.context_window - len(tokens.token_ids)
        request = self.engine.request(tokens, _sampling(options, room), settings)
        uses_of(self.engine).introduce([span.chunk for span in tokens.spans], self.engine)
        return request

    def _answer(self, request: Request) -> Generation:
        return self.engine.generate(request.prompt, request.sampling, request.settings)

    async def _aanswer(self, request: Request) -> Generation:
        return await self.engine.agenerate(request.prompt, request.sampling, request.settings)

    def _events(self, request: Request) -> closing[Any]:
        """Return the stream of an answer as a context manager; leaving it ends the engine's work."""
        return closing(cast(Any, self.engine.stream(request.prompt, request.sampling, request.settings)))

    def _aevents(self, request: Request) -> aclosing[Any]:
        return aclosing(cast(Any, self.engine.astream(request.prompt, request.sampling, request.settings)))

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
    chunks = {span.chunk.id: span.chunk for span in request.prompt.spans}
    missing = [chunks[chunk_id] for chunk_id in set(done.missing) if chunk_id in chunks]
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


def _sampling(options: Mapping[str, Any], room: int) -> SamplingParams:
    """Return how to decode; ``room`` is what the context window leaves for the answer."""
    given = {name: options[name] for name in (*_SAMPLING, "json_schema") if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    stop = given.get("stop", ())
    return SamplingParams(**{**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def _blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return how to treat stored KV."""
    return BlendSettings.from_params({name: options[name] for name in _BLEND if name in options})
