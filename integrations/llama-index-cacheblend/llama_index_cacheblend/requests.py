"""What LlamaIndex asks for, as what a `BlendEngine` takes: prompt, sampling and blend settings of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    InputError,
    Request,
    SamplingParams,
    chat_prompt,
    text_prompt,
)
from llama_index_cacheblend.messages import CHUNK_IDS, checked_ids, plain_message

DEFAULT_MAX_TOKENS = 512

Build = Callable[[Sequence[str]], BlendPrompt]
"""Builds a prompt, given the ids of the chunks to look for in it first."""

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop")
_BLEND = tuple(option.name for option in fields(BlendSettings))


def of_messages(engine: BlendEngine, messages: Sequence[ChatMessage]) -> Build:
    """Say how to build a chat's prompt: by the model's chat template."""

    def build(ids: Sequence[str]) -> BlendPrompt:
        plain = [plain_message(engine, message) for message in messages]
        return chat_prompt(engine.tokenizer, plain, engine.registry, chunk_ids=ids)

    return build


def of_text(engine: BlendEngine, text: str) -> Build:
    """Say how to build the prompt of text that is formatted already."""
    return lambda ids: text_prompt(engine.tokenizer, text, engine.registry, chunk_ids=ids)


def make_request(build: Build, llm: Any, named: Sequence[str], kwargs: Mapping[str, Any]) -> Request:
    """Put a call together; its prompt is tokenised here and nowhere else.

    Args:
        build: Builds the prompt.
        llm: Has the engine, and the options that the call does not give, as attributes.
        named: Ids of chunks the prompt is known to hold, beside those the call names.
        kwargs: Of the call.

    Raises:
        InputError: An argument that no call takes, or a value out of range.
        PromptTooLongError: Prompt and answer exceed the context window.
        UnknownChunkError: The call names a chunk that the engine does not know.
    """
    known = (*_SAMPLING, *_BLEND, "json_schema", CHUNK_IDS)
    if unknown := set(kwargs) - set(known):
        raise InputError(f"A call of {type(llm).__name__} takes no {listed(unknown)}. It takes {listed(known)}.")
    options = {**options_of(llm), **kwargs}
    settings = blend_settings(options)
    prompt = build([*checked_ids(kwargs.get(CHUNK_IDS)), *named])
    tokens = llm.engine.tokenize(prompt)
    if not tokens.spans:
        # An engine that is a client may yet find chunks in the text, in the registry of its server.
        tokens = replace(tokens, text="".join(part for part in prompt.segments if isinstance(part, str)))
    room = llm.engine.context_window - len(tokens.token_ids)
    request: Request = llm.engine.request(tokens, sampling_params(options, room), settings)
    return request


def options_of(llm: Any) -> dict[str, Any]:
    """Return the attributes of an LLM that a call may give, too."""
    return {name: getattr(llm, name) for name in (*_SAMPLING, *_BLEND)}


def sampling_params(options: Mapping[str, Any], room: int) -> SamplingParams:
    """Return how to decode; ``room`` is what the context window leaves for the answer."""
    given = {name: options[name] for name in (*_SAMPLING, "json_schema") if options.get(name) is not None}
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room)))
    stop = given.get("stop", ())
    return SamplingParams(**{**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return how to treat stored KV."""
    return BlendSettings.from_params({name: options[name] for name in _BLEND if name in options})


def answer_tokens(max_tokens: int | None, context_window: int) -> int:
    """Return how much of the context window prompts must leave: ``max_tokens``, else 512 or a quarter of a small window."""
    return max(1, min(DEFAULT_MAX_TOKENS, context_window // 4)) if max_tokens is None else max_tokens


def listed(names: Iterable[str]) -> str:
    """Return names as an error message lists them."""
    return ", ".join(sorted(map(repr, names)))
