"""Turns what LlamaIndex asks for into what a `BlendEngine` takes: prompt, sampling and blend settings of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage

from cacheblend_rag import BlendEngine, BlendPrompt, BlendSettings, InputError, chat_prompt, text_prompt
from cacheblend_rag.frameworks import (
    DEFAULT_MAX_TOKENS,
    SAMPLING_OPTIONS,
    CallReader,
    Request,
    RetrievalReport,
    call_schema,
    checked_on_miss,
    find_retrieved,
    reads_tools,
    required_tool,
    sampling_of,
    uses_of,
    with_usual_names,
)
from llama_index_cacheblend.messages import CHUNK_IDS, checked_ids, plain_message
from llama_index_cacheblend.watch import RETRIEVALS, current_span

Build = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], BlendPrompt]
"""Builds a prompt, given the ids of the chunks to look for in it first, and the tools that the model is shown."""


class Asked(NamedTuple):
    """Holds what the engine is asked, and what became in its prompt of what was retrieved for it."""

    request: Request
    retrieved: RetrievalReport
    reader: CallReader | None = None  # of tool calls, where the answer may hold any


_BLEND = tuple(option.name for option in fields(BlendSettings))


def of_messages(engine: BlendEngine, messages: Sequence[ChatMessage]) -> Build:
    """Say how to build a chat's prompt: by the model's chat template."""

    def build(ids: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> BlendPrompt:
        plain = [plain_message(engine, message) for message in messages]
        return chat_prompt(engine.tokenizer, plain, engine.registry, chunk_ids=ids, tools=tools or None)

    return build


def of_text(engine: BlendEngine, text: str) -> Build:
    """Say how to build the prompt of text that is formatted already."""

    def build(ids: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> BlendPrompt:
        if tools:
            raise InputError(
                "Tools are shown by the chat template; this prompt is formatted without it. Leave tools out."
            )
        return text_prompt(engine.tokenizer, text, engine.registry, chunk_ids=ids)

    return build


def make_request(build: Build, llm: Any, named: Sequence[str], kwargs: Mapping[str, Any]) -> Asked:
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
        AlteredChunkError: As ``on_miss`` wants it.
    """
    kwargs = with_usual_names(kwargs)
    known = (*SAMPLING_OPTIONS, *_BLEND, "json_schema", CHUNK_IDS, "on_miss", "tools", "tool_choice")
    if unknown := set(kwargs) - set(known):
        raise InputError(f"A call of {type(llm).__name__} takes no {listed(unknown)}. It takes {listed(known)}.")
    tools = () if kwargs.get("tool_choice") == "none" else kwargs.get("tools") or ()
    if tools and not reads_tools(llm.engine.tokenizer):
        raise InputError(
            f"The chat template of {llm.engine.fingerprint.name} does not show tools to the model, so it cannot call any. Use a "
            "model whose template does, or call it without tools."
        )
    required = required_tool(kwargs.get("tool_choice"), tools) if tools else False
    options = {**options_of(llm), **kwargs}
    if required is not False:
        options["json_schema"] = call_schema(tools, required)
    settings = blend_settings(options)
    ids = [*checked_ids(kwargs.get(CHUNK_IDS)), *named]
    on_miss = checked_on_miss(kwargs.get("on_miss", llm.on_miss))
    prompt, report = find_retrieved(llm.engine, lambda: build(ids, tools), RETRIEVALS, current_span(), on_miss)
    tokens = llm.engine.tokenize(prompt)
    if not tokens.spans:
        # An engine that is a client may yet find chunks in the text, in the registry of its server.
        tokens = replace(tokens, text="".join(part for part in prompt.segments if isinstance(part, str)))
    room = llm.engine.context_window - len(tokens.token_ids)
    request: Request = llm.engine.request(tokens, sampling_of(options, room), settings)
    uses_of(llm.engine).introduce([span.chunk for span in tokens.spans], llm.engine)
    return Asked(request, report, CallReader(tools, required) if tools else None)


def options_of(llm: Any) -> dict[str, Any]:
    """Return the attributes of an LLM that a call may give, too."""
    return {name: getattr(llm, name) for name in (*SAMPLING_OPTIONS, *_BLEND)}


def blend_settings(options: Mapping[str, Any]) -> BlendSettings:
    """Return how to treat stored KV."""
    return BlendSettings.from_params({name: options[name] for name in _BLEND if name in options})


def answer_tokens(max_tokens: int | None, context_window: int) -> int:
    """Return how much of the context window prompts must leave: ``max_tokens``, else 512 or a quarter of a small window."""
    return max(1, min(DEFAULT_MAX_TOKENS, context_window // 4)) if max_tokens is None else max_tokens


def listed(names: Iterable[str]) -> str:
    """Return names as an error message lists them."""
    return ", ".join(sorted(map(repr, names)))
