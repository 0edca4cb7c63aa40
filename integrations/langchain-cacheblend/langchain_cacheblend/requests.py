"""Holds the code that chat model and text LLM share: their fields, a call's parameters, and an answer's metadata."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
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
    NO_TOOLS,
    Asked,
    EngineName,
    OnMiss,
    Quality,
    Request,
    ToolsAsked,
    ask,
    check_engine,
    check_given,
    encoder_for,
    options_of,
    shared_engine,
    with_usual_names,
)
from langchain_cacheblend.runs import RETRIEVALS

# LangChain passes these arguments to every provider; they have no effect on a model in this process.
_IGNORED = {"strict", "parallel_tool_calls", "stream", "streaming"}
# Fields that name an engine; they are refused beside a given engine.
_NAMING = ("model", "store", "device", "dtype", "writer", "threads", "base_url")
_KEY_VARIABLE = "CACHEBLEND_API_KEY"
# LangChain gives these fields to every model; a given engine has its own connection, or none.
_CONNECTION = ("api_key", "timeout", "max_retries")


class PromptTooLong(PromptTooLongError, ContextOverflowError):  # noqa: N818 - named like its base
    """Says that the prompt exceeds the context window, as an error of both libraries, for LangChain's middleware."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise :class:`PromptTooLong` in place of PromptTooLongError, for LangChain."""
    try:
        yield
    except PromptTooLongError as error:
        raise PromptTooLong(str(error)) from error


class EngineFields(Serializable):
    """Holds the fields of both models. A call may override those from ``max_tokens`` on: ``llm.invoke(x, ratio=0.3)``.

    The model does not own an engine given as ``engine=``: close the engine yourself. A given engine is never
    serialised, printed or traced, and ``langchain_core.load.dumps`` writes its model as one that cannot be read back.
    Without a given engine, the next fields name the engine. A named engine is opened at its first use, shared by all
    models with the same names, and closed when the process ends. Without ``model`` and ``base_url``, the environment
    names the engine: ``CACHEBLEND_BASE_URL``, or ``CACHEBLEND_MODEL`` and ``CACHEBLEND_STORE``. ``engine="vllm"`` runs
    a named model on vLLM.

    Attributes:
        given_engine: The argument ``engine=``; :attr:`engine` is the engine that answers.
        model: Directory, GGUF file, hub name, ``"smollm2"`` or ``"bundled"``; with ``base_url`` the name that the
            server must serve.
        store: Location of stored KV: a directory, or tiers by address. None stores KV in RAM.
        device: ``"cpu"``, ``"cuda"``... None takes CUDA if there is one.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes fp32 on a CPU, the model's own elsewhere.
        writer: KV writer of the chunks: its directory, ``"probe"`` or ``"none"``; None takes the writer that the model
            comes with, as ``"smollm2"`` does.
        threads: CPU threads of torch, in the whole process; of several models with a number, the model asked last
            decides.
        base_url: Address of a `cacheblend serve`, which runs the model.
        api_key: Key for the server; None takes ``CACHEBLEND_API_KEY`` from the environment.
        timeout: Longest wait for the next piece of the server's answer, in seconds.
        max_retries: Number of times that a request is sent to the server again.
        max_tokens: Most tokens to generate; it is an error if prompt and answer exceed the context window. None takes
            512, or the tokens left in the window.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Number of likeliest tokens to sample from; 0 for all.
        seed: Makes sampling repeatable.
        presence_penalty: Subtracted from the logit of every token that the answer already contains, -2 to 2.
        frequency_penalty: Subtracted from the logit of a token for each time that the answer contains it, -2 to 2.
        stop_repeating: End an answer that says 16 to 128 tokens twice, one behind the other.
        logprobs: Return the log-probability of every token of the answer, and of this number of alternatives, in
            ``response_metadata["logprobs"]``.
        stop: Strings that end the answer; they are not part of it.
        ratio: Recompute ratio in [0, 1], or ``"auto"``: the model profile's, and more for text unlike the calibration's
            text. None takes the profile's ratio, and likewise for the next three fields.
        policy: Token-selection policy.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: Replaces the three fields above: ``"high"`` (the profile's blend), ``"fast"`` (recomputes less),
            ``"exact"`` (reuses only the KV that a prefix cache could reuse) or ``"full"`` (full prefill).
        on_miss: Reaction to retrieved chunks that the prompt lacks or has in an altered form, so that their stored KV
            is useless: ``"warn"`` (a log record: the answer is right, and only slower), ``"ignore"`` or ``"error"``.
            Answers report these chunks in any case. ``"error"`` also raises if the given policy fell back to another policy.
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
        """Refuse misspelt fields: pydantic would drop them, and the model would answer with unintended settings."""
        if not isinstance(values, Mapping):
            return values
        given = with_usual_names(values)
        # Copies that LangChain makes (`configurable_fields`) give the fields by their own names.
        engine = given["given_engine"] = given.pop("engine", given.get("given_engine"))
        names = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        if unknown := sorted(set(given) - names):
            known = ", ".join(sorted({"engine", *EngineFields.model_fields} - {"given_engine"}))
            raise InputError(f"{cls.__name__} has no field {unknown[0]!r}; it has {known}.")
        check_engine(engine, {name: given.get(name) for name in _NAMING})
        if isinstance(engine, BlendEngine) and (useless := [n for n in _CONNECTION if given.get(n) is not None]):
            warnings.warn(f"{', '.join(useless)}: without effect, the engine that is given has its own.", stacklevel=2)
        # Check before pydantic coerces the values, so that the error messages are the same as a call's.
        check_given(given)
        return given

    @property
    def engine(self) -> BlendEngine:
        """Return the engine that answers; open a named engine if it is not open.

        Raises:
            InputError, ModelError, ServerError, StoreError: See :func:`cacheblend_rag.frameworks.shared_engine`.
        """
        if isinstance(self.given_engine, BlendEngine):
            return self.given_engine
        # Not stored in a field: after the engine is closed, the next use opens another.
        named = {name: getattr(self, name) for name in (*_NAMING, "max_retries")}
        api_key = None if self.api_key is None else self.api_key.get_secret_value()
        return shared_engine(engine=self.given_engine, api_key=api_key, timeout_s=self.timeout, **named)

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Return the field that ``dumps`` never writes, and the environment variable that ``loads`` reads instead."""
        return {"api_key": _KEY_VARIABLE}

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return the set fields for ``dumps``; for a model with a given engine, a record that it cannot be rebuilt.

        ``loads(text, allowed_objects=[ChatCacheBlend], valid_namespaces=["langchain_cacheblend"], secrets_from_env=True)``
        reads the record back, with the key from ``CACHEBLEND_API_KEY``. ``is_lc_serializable`` stays False: otherwise
        LangChain's cache would treat models with different engines as one model.
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
        """Return the user's name for the engine's model."""
        return self.engine.fingerprint.name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return all parameters that determine the answer: the key of LangChain's LLM cache, also shown in traces."""
        # LangChain overwrites `stop` with the call's value, even with None; hence the second name `stop_sequences`.
        own = {"fingerprint": self.engine.fingerprint.digest, "stop_sequences": self.stop, **options_of(self)}
        return {"model_name": self.model_name, **own}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own tokens of ``text``, without the tokens that a template adds."""
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
            build: Builds the prompt from the chunks that the engine knows at that time.
            run: Run that this call is a part of.
            stop: Stop strings of this call; None takes the field's.
            kwargs: Other arguments of this call; they override the fields.
            known: Names in ``kwargs`` that the caller has handled.
            tools: Tools that the prompt shows.
            chat: Whether to separate the model's reasoning from the answer.

        Raises:
            InputError: An argument is unknown, a value is out of range, or the call names another model than the
                engine's.
            PromptTooLongError: Prompt and answer exceed the context window.
            AlteredChunkError: A retrieved chunk is not in the prompt, and ``on_miss`` is ``"error"``.
        """
        if kwargs.get("model", self.model_name) != self.model_name:
            raise InputError(
                f"This engine runs {self.model_name!r} and cannot answer as {kwargs['model']!r}; make an engine for it."
            )
        call = {name: value for name, value in kwargs.items() if name not in _IGNORED}
        if stop is not None:
            call["stop"] = stop
        names = ("model", *known)
        return ask(self, build, call, known=names, log=RETRIEVALS, run=run, tools=tools, chat=chat)

    def answer_metadata(self, done: Generation, asked: Asked) -> dict[str, Any]:
        """Return the response metadata of an answer: the model, the finish reason, and the outcome of the prompt."""
        return {
            **asked.logprobs(done),
            "model_name": self.model_name,
            "finish_reason": done.finish_reason,
            "cacheblend": asked.report(done),
        }


def usage_metadata(done: Generation, request: Request) -> UsageMetadata:
    """Return the token counts of an answer. The input details are disjoint and add up to at most ``input_tokens``.

    ``cache_read``: tokens whose stored KV was used as it is. ``recomputed``: tokens with stored KV that the selection
    policy chose to recompute. ``cache_creation``: tokens of chunks without stored KV, computed in place and stored for
    the next prompt.
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
