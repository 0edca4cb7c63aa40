"""What LlamaIndex asks for, as what a `BlendEngine` takes: prompt, sampling and blend settings of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from cacheblend_rag import BlendEngine, BlendPrompt, BlendSettings, InputError, SamplingParams, chat_prompt, text_prompt
from llama_index_cacheblend.messages import CHUNK_IDS, checked_ids, plain_message

Request = tuple[BlendPrompt, SamplingParams, BlendSettings]
Build = Callable[[Sequence[str]], BlendPrompt]
"""Builds a prompt, given the ids of the chunks to look for in it first."""

_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop", "json_schema")


def of_messages(engine: BlendEngine, messages: Sequence[ChatMessage]) -> Build:
    """Say how to build a chat's prompt: by the model's chat template."""

    def build(ids: Sequence[str]) -> BlendPrompt:
        plain = [plain_message(engine, message) for message in messages]
        return chat_prompt(engine.tokenizer, plain, engine.registry, chunk_ids=ids)

    return build


def of_text(engine: BlendEngine, text: str) -> Build:
    """Say how to build the prompt of text that is formatted already."""
    return lambda ids: text_prompt(text, engine.registry, chunk_ids=ids)


def make_request(build: Build, defaults: Any, named: Sequence[str], kwargs: Mapping[str, Any]) -> Request:
    """Put a call together.

    Args:
        build: Builds the prompt.
        defaults: Has the sampling and blend settings that the call does not give as attributes.
        named: Ids of chunks the prompt is known to hold, beside those the call names.
        kwargs: Of the call.

    Raises:
        InputError: An argument that no call takes, or a value out of range.
        UnknownChunkError: The call names a chunk that the engine does not know.
    """
    options = dict(kwargs)
    ids = checked_ids(options.pop(CHUNK_IDS, None))
    blend = options.pop("blend", None) or defaults.blend
    sampling = {name: options.pop(name, getattr(defaults, name, None)) for name in _SAMPLING}
    if options:
        known = (*_SAMPLING, "blend", CHUNK_IDS)
        raise InputError(f"A call of {type(defaults).__name__} takes no {listed(options)}. It takes {listed(known)}.")
    stop = sampling["stop"] or ()
    sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return build([*ids, *named]), SamplingParams(**sampling), blend


def listed(names: Iterable[str]) -> str:
    """Return names as an error message lists them."""
    return ", ".join(sorted(map(repr, names)))
