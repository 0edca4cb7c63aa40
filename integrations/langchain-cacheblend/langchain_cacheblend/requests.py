"""Shares between chat model and text LLM their fields, a call's parameters, and what a call reports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, get_args
from uuid import UUID

from langchain_core.exceptions import ContextOverflowError
from langchain_core.load.serializable import (
    Serializable,
    SerializedConstructor,
    SerializedNotImplemented,
    SerializedSecret,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import (
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from cacheblend_rag import BlendEngine, BlendPrompt, Generation, InputError
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.frameworks import (
    CALL_OPTIONS,
    NO_TOOLS,
    Asked,
    EngineName,
    OnMiss,
    Quality,
    Request,
    ToolsAsked,
    ask,
    check_given,
    check_run_options,
    encoder_for,
    options_of,
    sampling_of,
    shared_engine,
    with_usual_names,
)
from langchain_cacheblend.runs import RETRIEVALS

# Passed by LangChain to every provider; they ask for nothing that a model run in-process could do otherwise.
_IGNORED = {"strict", "parallel_tool_calls", "stream", "streaming"}
# What names an engine: with one that is given it would say nothing, or something else.
_NAMING = ("model", "store", "device", "dtype", "writer", "threads", "base_url")
_KEY_VARIABLE = "CACHEBLEND_API_KEY"
# LangChain gives these to every model; an engine that is given has its own, or no connection at all.
_CONNECTION = ("api_key", "timeout", "max_retries")


class PromptTooLong(PromptTooLongError, ContextOverflowError):  # noqa: N818 - named like its base
    """The prompt exceeds the context window, in the terms of both libraries (LangChain's middleware catches its own)."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Turn a prompt that is too long into the error LangChain looks for."""
    try:
        yield
    except PromptTooLongError as error:
        raise PromptTooLong(str(error)) from error


class EngineFields(Serializable):
    """The fields of both models. Those from ``max_tokens`` on may be given per call, too: ``llm.invoke(x, ratio=0.3)``.

    ``engine=`` takes an engine of yours: it is held, not owned, so close it yourself; it is never serialised, printed or traced,
    and a model that has one is written by ``langchain_core.load.dumps`` as one that cannot be read back.
    Without one the next fields name it; it is opened when it is first needed, shared by all that name it alike, and closed when
    the process ends. With neither, the environment does: ``CACHEBLEND_BASE_URL``, or ``CACHEBLEND_MODEL`` and
    ``CACHEBLEND_STORE``. ``engine="vllm"`` runs a model that is named on vLLM.

    Attributes:
        given_engine: What was given as ``engine=``; :attr:`engine` is what answers.
        model: A directory, a GGUF file, a hub name, ``"smollm2"`` or ``"bundled"``; with ``base_url`` the name that the server
            must serve.
        store: Where stored KV is: a directory, or tiers by address. None keeps it in RAM.
        device: ``"cpu"``, ``"cuda"``... None takes CUDA if there is one.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes fp32 on a CPU, the model's own elsewhere.
        writer: What computes the KV of chunks: the directory of a KV writer, ``"probe"`` or ``"none"``; None takes the one that
            the model comes with, as ``"smollm2"`` does.
        threads: CPU threads of torch, in the whole process: of several models that name them the one asked last counts.
        base_url: Address of a `cacheblend serve`, which has the model.
        api_key: Its key; None takes ``CACHEBLEND_API_KEY`` from the environment.
        timeout: Longest wait for the next piece of its answer, in seconds.
        max_retries: How often a request is sent to it again.
        max_tokens: Most tokens to generate; exceeding the context window with it is an error. None takes 512, or what the
            window leaves.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Sample from so many of the likeliest tokens; 0 for all.
        seed: Makes sampling repeatable.
        presence_penalty: Taken off the logit of every token that the answer has already, -2 to 2.
        frequency_penalty: The same, times how often it has it.
        stop_repeating: End an answer that says 16 to 128 tokens twice, one behind the other.
        logprobs: Return the log-probability of every token of the answer and of so many alternatives, in
            ``response_metadata["logprobs"]``.
        stop: Strings that end the answer; they are not part of it.
        ratio: Recompute ratio in [0, 1], or ``"auto"``: the model profile's, and more for text unlike that of its calibration.
            None takes the profile's, as with the next three.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: In place of the three: ``"high"`` (the profile's blend), ``"fast"`` (recomputes less), ``"exact"`` (only what a
            prefix cache could reuse) or ``"full"`` (full prefill).
        on_miss: What to do where a formatter has altered retrieved chunks, so that their stored KV is of no use: ``"warn"`` (a
            log record: the answer is right, and only slower), ``"ignore"`` or ``"error"``. Answers say it in any case. With
            ``"error"`` it is one, too, where the policy that is given gave way to another.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    given_engine: BlendEngine | EngineName | None = Field(default=None, exclude=True, repr=False)
    model: str | None = None
    store: str | None = None
    device: str | None = None
    dtype: str | None = None
    writer: str | None = None
    threads: int | None = None
    base_url: str | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True)
    timeout: float | None = None
    max_retries: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_repeating: bool = False
    logprobs: int | None = None
    stop: list[str] | None = None
    ratio: float | Literal["auto"] | None = None
    policy: str | None = None
    check_layers: tuple[int, ...] | None = None
    quality: Quality | None = None
    on_miss: OnMiss = "warn"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """Refuse misspelt fields: pydantic would drop them, and the model would answer with other settings than asked."""
        if not isinstance(values, Mapping):
            return values
        given = with_usual_names(values)
        # A copy that LangChain makes (`configurable_fields`) gives fields by their own names.
        engine = given["given_engine"] = given.pop("engine", given.get("given_engine"))
        names = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        if unknown := sorted(set(given) - names):
            known = ", ".join(sorted({"engine", *EngineFields.model_fields} - {"given_engine"}))
            raise InputError(f"{cls.__name__} has no field {unknown[0]!r}; it has {known}.")
        _check_named(engine, given)
        # Before pydantic coerces the values: what is wrong is said as in a call.
        check_given(given)
        check_run_options(given.get("dtype"), given.get("threads"))
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse values outside their range when the model is made, not at its first call."""
        sampling_of(options_of(self), room=1)
        return self

    @property
    def engine(self) -> BlendEngine:
        """Return the engine that answers; opened now if it was named and is not open.

        Raises:
            InputError, ModelError, ServerError, StoreError: As :func:`cacheblend_rag.frameworks.shared_engine`.
        """
        if isinstance(self.given_engine, BlendEngine):
            return self.given_engine
        # Not kept: once it is closed, the next use opens another.
        return shared_engine(
            self.model,
            engine=self.given_engine or "transformers",
            store=self.store,
            device=self.device,
            dtype=self.dtype,
            writer=self.writer,
            threads=self.threads,
            base_url=self.base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            timeout_s=self.timeout,
            max_retries=self.max_retries,
        )

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Return the field that ``dumps`` never writes, and the environment variable that ``loads`` reads instead."""
        return {"api_key": _KEY_VARIABLE}

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return what ``dumps`` writes: the fields that are set; of a model that holds an engine, that it cannot be made of them.

        ``loads(text, allowed_objects=[ChatCacheBlend], valid_namespaces=["langchain_cacheblend"], secrets_from_env=True)`` reads
        it back, the key from ``CACHEBLEND_API_KEY``. ``is_lc_serializable`` stays False: else LangChain's cache would take models
        that hold different engines for one.
        """
        if isinstance(self.given_engine, BlendEngine):
            return self.to_json_not_implemented()
        written = {
            name: value
            for name, field in type(self).model_fields.items()
            if not field.exclude and (value := getattr(self, name)) != field.get_default(call_default_factory=True)
        }
        if self.given_engine is not None:
            written["engine"] = self.given_engine
        if self.api_key is not None:
            written["api_key"] = SerializedSecret(lc=1, type="secret", id=[_KEY_VARIABLE])
        return SerializedConstructor(lc=1, type="constructor", id=self.lc_id(), kwargs=written)

    @property
    def model_name(self) -> str:
        """Return what the user called the engine's model."""
        return self.engine.fingerprint.name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return what decides the answer: the key of LangChain's LLM cache, and what tracers see."""
        # LangChain puts the call's `stop`, None as well, in the place of ours.
        own = {"fingerprint": self.engine.fingerprint.digest, "stop_sequences": self.stop, **options_of(self)}
        return {"model_name": self.model_name, **own}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own tokens of ``text``, without any that a template adds."""
        return encoder_for(self.engine.tokenizer).document(text)

    def request(
        self,
        build: Callable[[], BlendPrompt],
        run: UUID | None,
        stop: Sequence[str] | None,
        kwargs: Mapping[str, Any],
        known: Sequence[str] = (),
        tools: ToolsAsked = NO_TOOLS,
        chat: bool = False,
    ) -> Asked:
        """Return the engine call for a prompt.

        Args:
            build: Makes the prompt, of the chunks that the engine knows then.
            run: The run that this call is a part of.
            stop: Stop strings of this call; None takes the field's.
            kwargs: The other arguments of this call; they go before the fields.
            known: Names in ``kwargs`` that the caller has dealt with.
            tools: The tools that the prompt shows.
            chat: Whether thoughts are told from the answer.

        Raises:
            InputError: An argument that nothing reads, a value out of range, or another model than the engine's.
            PromptTooLongError: Prompt and answer exceed the context window.
            AlteredChunkError: As ``on_miss`` wants it.
        """
        kwargs = with_usual_names(kwargs)
        allowed = {*CALL_OPTIONS, *_IGNORED, *known, "json_schema", "model", "on_miss"}
        if unknown := sorted(set(kwargs) - allowed):
            raise InputError(
                f"Unknown argument {unknown[0]!r}; this model takes {', '.join(sorted(allowed - _IGNORED))}."
            )
        if kwargs.get("model", self.model_name) != self.model_name:
            raise InputError(
                f"This engine runs {self.model_name!r} and cannot answer as {kwargs['model']!r}; make an engine for it."
            )
        options = options_of(self, {"on_miss": self.on_miss, **kwargs})
        if stop is not None:
            options["stop"] = stop
        return ask(self.engine, build, options, log=RETRIEVALS, run=run, tools=tools, chat=chat)

    def answer_metadata(self, done: Generation, asked: Asked) -> dict[str, Any]:
        """Return the response metadata of an answer: which model, why it ended, how its KV came about."""
        return {
            **asked.logprobs(done),
            "model_name": self.model_name,
            "finish_reason": done.finish_reason,
            "cacheblend": asked.report(done),
        }


def _check_named(engine: Any, given: Mapping[str, Any]) -> None:
    """Refuse what is no engine, and names of one beside it."""
    if not isinstance(engine, BlendEngine):
        if engine not in (None, *get_args(EngineName)):
            raise InputError(
                f"engine is {engine!r}; give an engine, or {' or '.join(map(repr, get_args(EngineName)))}."
            )
        return
    if named := [name for name in _NAMING if given.get(name) is not None]:
        raise InputError(
            f"{named[0]} is for a model by name, and an engine is given: give either engine= or {named[0]}=."
        )
    if without := [name for name in _CONNECTION if given.get(name) is not None]:
        warnings.warn(f"{', '.join(without)}: without effect, the engine that is given has its own.", stacklevel=3)


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
