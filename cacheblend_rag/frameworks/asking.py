"""Puts together what a framework's model asks its engine, by its own options and the call's; says what became of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import aclosing, closing
from copy import copy
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from tokenizers.decoders import DecodeStream

from cacheblend_rag.blending.policies import policy_name
from cacheblend_rag.blending.settings import HOW_NAMES, OPTION_NAMES, BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Request
from cacheblend_rag.engines.results import Generation, TokenLogprob
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import Parts, ThoughtReader
from cacheblend_rag.errors import InputError
from cacheblend_rag.frameworks.calls import NO_TOOLS, CallReader, CallsRead, ToolsAsked, call_schema
from cacheblend_rag.frameworks.retrieved import RetrievalLog, RetrievalReport, checked_on_miss, find_retrieved
from cacheblend_rag.frameworks.uses import uses_of
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt

SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingParams) if option.name != "json_schema")

CALL_OPTIONS = (*SAMPLING_OPTIONS, *OPTION_NAMES)
"""Names of the options that a call of a framework's model may give in place of the model's own attributes."""

DEFAULT_MAX_TOKENS = 512
"""Most tokens of an answer, where the context window leaves as many."""

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "stop_sequences": "stop", "request_timeout": "timeout"}


def with_usual_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model or call with our names where OpenAI's and others' were given.

    ``max_completion_tokens`` is ``max_tokens``, ``stop_sequences`` is ``stop``, ``request_timeout`` is ``timeout``; OpenAI's
    ``logprobs=True`` and ``top_logprobs=n`` are ``logprobs=n``.

    Raises:
        InputError: One thing is given under two names.
    """
    found = {name: value for name, value in options.items() if name not in (*_OTHER_NAMES, "top_logprobs")}
    for other, name in _OTHER_NAMES.items():
        if options.get(other) is not None:
            if found.get(name) is not None:
                raise InputError(f"{other} and {name} are the same; give one of them.")
            found[name] = options[other]
    if isinstance(found.get("logprobs"), bool):
        found["logprobs"] = 0 if found["logprobs"] else None
    if (count := options.get("top_logprobs")) is not None:
        if found.get("logprobs") != 0:
            raise InputError("top_logprobs goes with logprobs=True; give that, too, or logprobs=n alone.")
        found["logprobs"] = count
    return found


def sampling_of(options: Mapping[str, Any], room: int) -> SamplingParams:
    """Return how to decode; what is None is left open.

    Args:
        options: SamplingParams' names; ``stop`` may be one string.
        room: Tokens that the context window leaves for the answer.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    names = (*SAMPLING_OPTIONS, "json_schema")
    given = {name: options[name] for name in names if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    stop = given.get("stop", ())
    return SamplingParams(**{**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return how to treat stored KV.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    return BlendSettings.from_params({name: options[name] for name in OPTION_NAMES if name in options})


def check_given(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be an option's value, before pydantic coerces it: what is wrong is said as in a call.

    Raises:
        InputError: A value of a wrong type or outside its range.
    """
    blend_settings(options)
    checked_on_miss(options.get("on_miss", "warn"))


def options_of(model: Any, call: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the attributes of a framework's model that a call may give, too, and over them what ``call`` gives.

    Where a call gives ``quality`` the model's ratio, policy and check layers are nothing to it, and the other way round.
    """
    own = {name: getattr(model, name) for name in CALL_OPTIONS}
    if call.get("quality") is not None:
        own |= dict.fromkeys(HOW_NAMES)
    elif any(call.get(name) is not None for name in HOW_NAMES):
        own["quality"] = None
    return {**own, **call}


class AnswerPart(NamedTuple):
    """Holds what a piece of an answer adds to its text and to its thoughts, and with the last piece the calls of tools."""

    text: str
    calls: CallsRead | None = None  # where it may hold any
    reasoning: str = ""


@dataclass(frozen=True)
class Asked:
    """One call of a framework's model, ready for its engine; :func:`ask` makes it.

    Attributes:
        engine: The engine that answers.
        request: What it is asked.
        retrieved: What became in its prompt of what was retrieved for it.
        reader: Reads calls of tools off the answer, where it may hold any.
        policy: The policy that may give way to no other, if any.
        thoughts: Reads thoughts off the answer; None where they are part of it.
    """

    engine: BlendEngine
    request: Request
    retrieved: RetrievalReport
    reader: CallReader | None = None
    policy: str | None = None
    thoughts: ThoughtReader | None = None

    @property
    def _arguments(self) -> tuple[TokenizedPrompt, SamplingParams, BlendSettings]:
        return self.request.prompt, self.request.sampling, self.request.settings.asked

    def answer(self) -> Generation:
        """Return the answer; raises as :meth:`BlendEngine.generate` does."""
        return self.engine.generate(*self._arguments)

    async def aanswer(self) -> Generation:
        """Async twin of :meth:`answer`."""
        return await self.engine.agenerate(*self._arguments)

    def events(self) -> closing[Any]:
        """Return the stream of the answer as a context manager; leaving it ends the engine's work."""
        return closing(cast(Any, self.engine.stream(*self._arguments)))

    def aevents(self) -> aclosing[Any]:
        """Async twin of :meth:`events`."""
        return aclosing(cast(Any, self.engine.astream(*self._arguments)))

    def read(self, text: str, last: bool = True) -> AnswerPart:
        """Take the next text of the answer, or all of it, and return its parts; the ``last`` brings the calls."""
        said = Parts(text) if self.thoughts is None else self.thoughts.push(text, last)
        if self.reader is None:
            return AnswerPart(said.answer, None, said.reasoning)
        text = self.reader.push(said.answer)
        if not last:
            return AnswerPart(text, None, said.reasoning)
        calls = self.reader.finish()
        return AnswerPart(text + calls.text, calls, said.reasoning)

    def report(self, done: Generation) -> dict[str, Any]:
        """Return what an answer's metadata say of its KV and of what was retrieved; InputError where ``policy`` gave way."""
        if self.policy is not None and done.policy not in (None, self.policy):
            raise InputError(f"{done.reason}. Leave the policy open, or set on_miss='warn'.")
        retrieved = self.retrieved.answered(done.missing)
        return {
            **done.facts,
            "reason": f"{done.reason}; {retrieved.summary}" if retrieved.altered else done.reason,
            "retrieved": retrieved.to_dict(),
            "timings": dict(vars(done.timings)),
        }

    def logprobs(self, done: Generation) -> dict[str, Any]:
        """Return the log-probabilities of an answer under OpenAI's key; nothing where they were not asked for."""
        if self.request.sampling.logprobs is None:
            return {}
        return {"logprobs": {"content": openai_logprobs(done.logprobs, self.engine.tokenizer)}}


def ask(
    engine: BlendEngine,
    build: Callable[[], BlendPrompt],
    options: Mapping[str, Any],
    *,
    log: RetrievalLog,
    run: Hashable | None,
    tools: ToolsAsked = NO_TOOLS,
    chat: bool = False,
) -> Asked:
    """Put a call together; its prompt is tokenised here and nowhere else.

    Args:
        engine: The engine that answers.
        build: Builds the prompt, of the chunks that the engine knows then.
        options: :data:`CALL_OPTIONS`, ``json_schema`` and ``on_miss``.
        log: What was retrieved.
        run: The run of the framework that this call is part of.
        tools: The tools that the prompt shows, and which of them the answer must call.
        chat: Whether thoughts are told from the answer.

    Raises:
        InputError: A value of a wrong type or outside its range.
        PromptTooLongError: Prompt and answer exceed the context window.
        AlteredChunkError: As ``on_miss`` wants it.
    """
    options = {**options, "json_schema": _form_of(tools, options.get("json_schema"))}
    settings = blend_settings(options)
    prompt, retrieved = find_retrieved(engine, build, log, run, checked_on_miss(options["on_miss"]))
    tokens = engine.tokenize(prompt)
    texts = [part for part in prompt.segments if isinstance(part, str)]
    if len(texts) == len(prompt.segments):
        # An engine that is a client may yet find chunks in the text, in the registry of its server.
        tokens = replace(tokens, text="".join(texts))
    room = engine.context_window - len(tokens.token_ids)
    request = engine.request(tokens, sampling_of(options, room), settings)
    uses_of(engine).introduce([span.chunk for span in tokens.spans], engine)
    reader = CallReader(*tools) if tools.specs else None
    wanted = settings.policy if options["on_miss"] == "error" else None
    thoughts = ThoughtReader(engine.tokenizer, request.prompt, request.sampling) if chat else None
    return Asked(engine, request, retrieved, reader, None if wanted is None else policy_name(wanted), thoughts)


def _form_of(tools: ToolsAsked, schema: Mapping[str, Any] | str | None) -> Mapping[str, Any] | str | None:
    """Return the JSON schema of an answer that is to conform to ``schema``, or may or must call a tool."""
    if tools.required is not False:
        return call_schema(tools.specs, tools.required)
    if schema is None or not tools.specs:
        return schema
    return call_schema(tools.specs, True, SamplingParams(json_schema=schema).schema())


def openai_logprobs(logprobs: Iterable[TokenLogprob], tokenizer: Any) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of OpenAI's chat API: for each token its text, bytes and alternatives.

    A token's text is what it adds behind those before it, so that they join to the answer. A token that ends inside a character
    adds none and has no bytes; the one that completes the character has all of it.
    """
    backend, stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=False)

    def one(behind: DecodeStream, token_id: int, logprob: float) -> dict[str, Any]:
        text = behind.step(backend, token_id)
        return {"token": text or "", "logprob": logprob, "bytes": None if text is None else list(text.encode())}

    found = []
    for each in logprobs:
        others = [one(copy(stream), *other) for other in each.top]
        found.append({**one(stream, each.token_id, each.logprob), "top_logprobs": others})
    return found
