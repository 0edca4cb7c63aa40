"""Converts the engine's results to LlamaIndex responses, and collects them for chains that do not return responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent

from cacheblend_rag import Generation
from cacheblend_rag.frameworks import Asked

_OWN = "cacheblend"
_Response = TypeVar("_Response", ChatResponse, CompletionResponse)


def raw_of(generation: Generation, asked: Asked) -> dict[str, Any]:
    """Return the `raw` of a finished response.

    ``usage`` has OpenAI's names and the names of Usage: ``prompt_tokens = reused_tokens + computed_tokens``;
    ``recomputed_tokens`` counts the computed tokens that had stored KV. Every token in
    ``prompt_tokens_details.cached_tokens`` was reused as it is. ``retrieved`` gives the status of each retrieved chunk.
    """
    usage, report = generation.usage, asked.report(generation)
    return {
        **asked.logprobs(generation),
        "object": _OWN,
        "model": asked.engine.fingerprint.name,
        "finish_reason": generation.finish_reason,
        **report,
        "usage": {
            **report["usage"],
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        },
    }


def chat_response(text: str, delta: str | None, raw: dict[str, Any] | None) -> ChatResponse:
    """Return a (partial) answer as a chat response."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=raw, logprobs=_logprobs(raw))


class _Thoughtful(ChatMessage):
    """Accepts a new text and keeps its reasoning: chat engines before 0.14.25 set the text when a stream has ended."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "content":
            self.blocks = [
                *(each for each in self.blocks if not isinstance(each, types.TextBlock)),
                types.TextBlock(text=value),
            ]
        else:
            super().__setattr__(name, value)


def with_thoughts(response: _Response, reasoning: str, new: str | None = None) -> _Response:
    """Put ``reasoning`` into the answer's message, as a separate block; ``new`` is the part in this piece."""
    if reasoning and isinstance(response, ChatResponse):
        block = getattr(types, "ThinkingBlock", None)  # the lowest supported version lacks the class
        if block is not None:
            blocks = [block(content=reasoning), *response.message.blocks]
            response.message = _Thoughtful(role=response.message.role, blocks=blocks)
        if new:
            response.additional_kwargs["thinking_delta"] = new  # LlamaIndex's agents read this key
    return response


def completion_response(text: str, delta: str | None, raw: dict[str, Any] | None) -> CompletionResponse:
    """Return a (partial) answer as a completion."""
    return CompletionResponse(text=text, delta=delta, raw=raw, logprobs=_logprobs(raw))


def _logprobs(raw: dict[str, Any] | None) -> list[list[LogProb]] | None:
    """Return each token of the answer, followed by its alternatives; None if log-probabilities were not requested."""
    if raw is None or "logprobs" not in raw:
        return None
    return [
        [LogProb(token=o["token"], logprob=o["logprob"], bytes=o["bytes"]) for o in (each, *each["top_logprobs"])]
        for each in raw["logprobs"]["content"]
    ]


@dataclass(frozen=True)
class Call:
    """Holds one finished call of a CacheBlendLLM.

    Attributes:
        text: The answer.
        mode: ``"blend"`` or ``"prefill"``.
        reason: Why the engine chose this mode, in words.
        usage: Token counts; see :func:`raw_of`.
        retrieved: How the prompt used the retrieved chunks: counts, and the status of each chunk.
        raw: The response's whole `raw`.

    Example:
        Print how many tokens a call reused::

            with collect_usage() as calls:
                query_engine.query("Who is the captain?")
            print(calls[-1].mode, calls[-1].usage["reused_tokens"])
    """

    text: str
    mode: str
    reason: str
    usage: dict[str, Any]
    retrieved: dict[str, Any]
    raw: dict[str, Any]


class UsageHandler(BaseEventHandler):
    """Collects the report of every CacheBlendLLM call, in any chain. See :func:`collect_usage`.

    Example:
        Collect calls until the process ends::

            handler = UsageHandler()
            get_dispatcher().add_event_handler(handler)
            query_engine.query("Who is the captain?")
            print(len(handler.calls))
    """

    _calls: list[Call] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the handler."""
        return "CacheBlendUsageHandler"

    @property
    def calls(self) -> list[Call]:
        """Return the finished calls, in order of completion."""
        return self._calls

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Record the call of a finished chat or completion event."""
        if not isinstance(event, (LLMChatEndEvent, LLMCompletionEndEvent)) or event.response is None:
            return
        raw = event.response.raw
        if isinstance(raw, dict) and raw.get("object") == _OWN:
            response = event.response
            text = response.message.content or "" if isinstance(response, ChatResponse) else response.text
            self._calls.append(Call(text, raw["mode"], raw["reason"], raw["usage"], raw["retrieved"], raw))


@contextmanager
def collect_usage() -> Iterator[list[Call]]:
    """Collect the calls that finish anywhere in this process while the block runs.

    A streamed call finishes when its last piece is read.

    Example:
        Print the token counts of every call of a query::

            with collect_usage() as calls:
                query_engine.query("Who is the captain?")
            print([call.usage for call in calls])
    """
    handler = UsageHandler()
    handlers = get_dispatcher().event_handlers
    handlers.append(handler)
    try:
        yield handler.calls
    finally:
        handlers[:] = [other for other in handlers if other is not handler]
