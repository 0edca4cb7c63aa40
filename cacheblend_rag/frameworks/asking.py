"""Makes engine requests of a framework's model and call options, and reports what became of each prompt."""

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
from cacheblend_rag.prompts.prompt import BlendPrompt

SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingParams) if option.name != "json_schema")

CALL_OPTIONS = (*SAMPLING_OPTIONS, *OPTION_NAMES)
"""Names of the options that a call of a framework's model may give in place of the model's own attributes."""

DEFAULT_MAX_TOKENS = 512
"""Maximum number of tokens in an answer, if the context window leaves as many."""

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "stop_sequences": "stop", "request_timeout": "timeout"}


def with_usual_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model or call, with OpenAI's and others' names replaced by the library's names.

    ``max_completion_tokens`` becomes ``max_tokens``, ``stop_sequences`` becomes ``stop``, and ``request_timeout``
    becomes ``timeout``; OpenAI's ``logprobs=True`` and ``top_logprobs=n`` become ``logprobs=n``.

    Raises:
        InputError: One option is given under two names, or ``top_logprobs`` without ``logprobs=True``.
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
    """Return the sampling parameters of an answer with at most ``room`` tokens; an option of None keeps its default."""
    names = (*SAMPLING_OPTIONS, "json_schema")
    given = {name: options[name] for name in names if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    if isinstance(stop := given.get("stop"), str | list):
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(**given)


def blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return the settings for the reuse of stored KV."""
    return BlendSettings.from_params({name: options[name] for name in OPTION_NAMES if name in options})


def check_given(options: Mapping[str, Any]) -> None:
    """Raise the InputError that a call would raise for invalid options, before pydantic coerces the values."""
    blend_settings(options)
    sampling_of(options, room=1)
    checked_on_miss(options.get("on_miss", "warn"))


def options_of(model: Any, call: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the attributes of a framework's model that a call may override, with the values of ``call`` over them.

    A call's ``quality`` overrides the model's ratio, policy and check layers; each of these in a call overrides
    ``quality``.
    """
    own = {name: getattr(model, name) for name in CALL_OPTIONS}
    if call.get("quality") is not None:
        own |= dict.fromkeys(HOW_NAMES)
    elif any(call.get(name) is not None for name in HOW_NAMES):
        own["quality"] = None
    return {**own, **call}


class AnswerPart(NamedTuple):
    """Holds the text and the thoughts in a piece of an answer and, in the last piece, the calls of tools."""

    text: str
    calls: CallsRead | None = None  # None if the piece is not the last, or no tools were shown
    reasoning: str = ""


@dataclass(frozen=True)
class Asked:
    """Holds one call of a framework's model, ready for its engine; :func:`ask` makes it.

    Attributes:
        engine: Engine that answers.
        request: Request to the engine.
        retrieved: Report on the texts that were retrieved for the prompt.
        reader: Reads calls of tools in the answer; None if the prompt shows no tools.
        policy: Policy that the engine must not replace by another, if any.
        thoughts: Separates thoughts from the answer; None if thoughts are part of the answer.
    """

    engine: BlendEngine
    request: Request
    retrieved: RetrievalReport
    reader: CallReader | None = None
    policy: str | None = None
    thoughts: ThoughtReader | None = None

    def answer(self) -> Generation:
        """Return the answer; raises the errors of :meth:`BlendEngine.generate`."""
        return self.engine.generate(self.request)

    async def aanswer(self) -> Generation:
        """Return the answer asynchronously; see :meth:`answer`."""
        return await self.engine.agenerate(self.request)

    def events(self) -> closing[Any]:
        """Return the stream of the answer as a context manager; leaving the context ends the engine's work."""
        return closing(cast(Any, self.engine.stream(self.request)))

    def aevents(self) -> aclosing[Any]:
        """Return the asynchronous stream of the answer as a context manager; see :meth:`events`."""
        return aclosing(cast(Any, self.engine.astream(self.request)))

    def read(self, text: str, last: bool = True) -> AnswerPart:
        """Return the parts of the answer's next text, or of the whole answer; the ``last`` text also has the calls."""
        said = Parts(text) if self.thoughts is None else self.thoughts.push(text, last)
        if self.reader is None:
            return AnswerPart(said.answer, None, said.reasoning)
        text = self.reader.push(said.answer)
        if not last:
            return AnswerPart(text, None, said.reasoning)
        calls = self.reader.finish()
        return AnswerPart(text + calls.text, calls, said.reasoning)

    def report(self, done: Generation) -> dict[str, Any]:
        """Return an answer's metadata on KV and retrieved texts; raise InputError if the engine replaced ``policy``."""
        if self.policy is not None and done.policy not in (None, self.policy):
            raise InputError(f"{done.reason}. Leave the policy open, or set on_miss='warn'.")
        retrieved = self.retrieved.answered(done)
        return {**done.facts, "retrieved": retrieved, "timings": dict(vars(done.timings))}

    def logprobs(self, done: Generation) -> dict[str, Any]:
        """Return the log-probabilities of an answer under OpenAI's key, or an empty dict if they were not requested."""
        if self.request.sampling.logprobs is None:
            return {}
        return {"logprobs": {"content": openai_logprobs(done.logprobs, self.engine.tokenizer)}}


def ask(
    model: Any,
    build: Callable[[], BlendPrompt],
    call: Mapping[str, Any],
    *,
    known: Iterable[str] = (),
    log: RetrievalLog,
    run: Hashable | None,
    tools: ToolsAsked = NO_TOOLS,
    chat: bool = False,
) -> Asked:
    """Prepare a call of a framework's model, and tokenise its prompt; no other function tokenises the prompt.

    Args:
        model: The framework's model; has the engine, ``on_miss`` and the :data:`CALL_OPTIONS` as attributes.
        build: Builds the prompt from the chunks that the engine knows at the time.
        call: Arguments of the call: :data:`CALL_OPTIONS`, ``json_schema`` and ``on_miss``, which override the model's.
        known: Names of further arguments, which the caller has handled.
        log: Log of the retrieved texts.
        run: Run of the framework that contains this call.
        tools: Tools that the prompt shows, and which tool the answer must call.
        chat: Whether to separate thoughts from the answer.

    Raises:
        InputError: An argument is unknown, or a value has a wrong type or is outside its range.
        PromptTooLongError: Prompt and answer exceed the context window.
        AlteredChunkError: A retrieved chunk is not in the prompt, and ``on_miss`` is ``"error"``.
    """
    call, engine = with_usual_names(call), model.engine
    allowed = {*CALL_OPTIONS, "json_schema", "on_miss", *known}
    if unknown := ", ".join(sorted(map(repr, set(call) - allowed))):
        raise InputError(f"A call of {type(model).__name__} takes no {unknown}; it takes {', '.join(sorted(allowed))}.")
    options = options_of(model, {"on_miss": model.on_miss, **call})
    options["json_schema"] = _form_of(tools, call.get("json_schema"))
    settings = blend_settings(options)
    prompt, retrieved = find_retrieved(engine, build, log, run, checked_on_miss(options["on_miss"]))
    tokens = engine.tokenize(prompt)
    texts = [part for part in prompt.segments if isinstance(part, str)]
    if len(texts) == len(prompt.segments):
        # A client engine's server may find chunks in the text that only the server's registry knows.
        tokens = replace(tokens, text="".join(texts))
    room = engine.context_window - len(tokens.token_ids)
    request = engine.request(tokens, sampling_of(options, room), settings)
    uses_of(engine).introduce([span.chunk for span in tokens.spans], engine)
    reader = CallReader(*tools) if tools.specs else None
    wanted = settings.policy if options["on_miss"] == "error" else None
    thoughts = ThoughtReader(engine.tokenizer, request.prompt, request.sampling) if chat else None
    return Asked(engine, request, retrieved, reader, None if wanted is None else policy_name(wanted), thoughts)


def _form_of(tools: ToolsAsked, schema: Mapping[str, Any] | str | None) -> Mapping[str, Any] | str | None:
    """Return the JSON schema of an answer that must call a tool, or must conform to ``schema`` but may call a tool."""
    if tools.required is not False:
        return call_schema(tools.specs, tools.required)
    if schema is None or not tools.specs:
        return schema
    return call_schema(tools.specs, True, SamplingParams(json_schema=schema).schema())


def openai_logprobs(logprobs: Iterable[TokenLogprob], tokenizer: Any) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of OpenAI's chat API: the text, bytes and alternatives of each token.

    The text of a token is the text that the token adds to the tokens before it, so that all texts join to the answer. A
    token that ends inside a character has an empty text and no bytes; the token that completes the character has the
    whole character.
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
