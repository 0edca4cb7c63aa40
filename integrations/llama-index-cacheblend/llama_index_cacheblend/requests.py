"""Converts a LlamaIndex call to the prompt, sampling and blend settings of a `BlendEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from cacheblend_rag import BlendEngine, BlendPrompt, InputError, chat_prompt, text_prompt
from cacheblend_rag.frameworks import (
    DEFAULT_MAX_TOKENS,
    Asked,
    ask,
    check_shown,
    tools_asked,
)
from llama_index_cacheblend.messages import CHUNK_IDS, checked_ids, plain_message
from llama_index_cacheblend.watch import RETRIEVALS, current_span

Build = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], BlendPrompt]
"""Builds a prompt from the ids of the chunks to search for first and from the tools shown to the model."""


def of_messages(engine: BlendEngine, messages: Sequence[ChatMessage], template_kwargs: Mapping[str, Any]) -> Build:
    """Return the builder of a chat's prompt by the model's chat template, with ``template_kwargs`` as its variables."""

    def build(ids: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> BlendPrompt:
        plain = [plain_message(engine, message) for message in messages]
        return chat_prompt(
            engine.tokenizer,
            plain,
            engine.registry,
            chunk_ids=ids,
            tools=tools or None,
            chat_template_kwargs=template_kwargs,
        )

    return build


def of_text(engine: BlendEngine, text: str) -> Build:
    """Return the builder of a prompt from formatted text."""

    def build(ids: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> BlendPrompt:
        if tools:
            raise InputError(
                "Tools are shown by the chat template; this prompt is formatted without it. Leave tools out."
            )
        return text_prompt(engine.tokenizer, text, engine.registry, chunk_ids=ids)

    return build


def make_request(build: Build, llm: Any, named: Sequence[str], kwargs: Mapping[str, Any], chat: bool = False) -> Asked:
    """Return the engine call of a LlamaIndex call.

    Args:
        build: Builds the prompt.
        llm: LLM with the engine, and with the options that the call does not give as attributes.
        named: Ids of chunks known to be in the prompt, besides the chunks that the call names.
        kwargs: Arguments of the call.
        chat: Whether to separate the model's reasoning from the answer.

    Raises:
        InputError: An argument is unknown, or a value is out of range.
        PromptTooLongError: Prompt and answer exceed the context window.
        UnknownChunkError: The call names a chunk that the engine does not know.
        AlteredChunkError: A retrieved chunk is not in the prompt, and ``on_miss`` is ``"error"``.
    """
    tools = tools_asked(kwargs.get("tools") or (), kwargs.get("tool_choice"))
    check_shown(llm.engine, tools.specs)
    known = (CHUNK_IDS, "tools", "tool_choice")
    ids = [*checked_ids(kwargs.get(CHUNK_IDS)), *named]
    return ask(
        llm,
        lambda: build(ids, tools.specs),
        kwargs,
        known=known,
        log=RETRIEVALS,
        run=current_span(),
        tools=tools,
        chat=chat,
    )


def answer_tokens(max_tokens: int | None, context_window: int) -> int:
    """Return the tokens to leave for the answer: ``max_tokens``, else 512 or a quarter of a small context window."""
    return max(1, min(DEFAULT_MAX_TOKENS, context_window // 4)) if max_tokens is None else max_tokens


def listed(names: Iterable[str]) -> str:
    """Return ``names`` sorted and joined, for an error message."""
    return ", ".join(sorted(map(repr, names)))
