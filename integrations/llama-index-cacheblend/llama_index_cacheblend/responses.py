"""Turns what the engine reports into LlamaIndex responses, also for chains that do not hand responses out."""

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

    ``usage`` has OpenAI's names and Usage's: ``prompt_tokens = reused_tokens + computed_tokens``; ``recomputed_tokens`` are those
    of the computed ones that had stored KV. Every token in ``prompt_tokens_details.cached_tokens`` was reused as it is.
    ``retrieved`` says what became of each retrieved chunk.
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
    """Takes a new text beside its thoughts: chat engines before 0.14.25 set it when a stream has ended."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "content":
            self.blocks = [
                *(each for each in self.blocks if not isinstance(each, types.TextBlock)),
                types.TextBlock(text=value),
            ]
        else:
            super().__setattr__(name, value)


def with_thoughts(response: _Response, reasoning: str, new: str | None = None) -> _Response:
    """Put what was thought before an answer into its message, in a block of its own; ``new`` of it in this piece."""
    if reasoning and isinstance(response, ChatResponse):
        block = getattr(types, "ThinkingBlock", None)  # the lowest supported version has none
        if block is not None:
            blocks = [block(content=reasoning), *response.message.blocks]
            response.message = _Thoughtful(role=response.message.role, blocks=blocks)
        if new:
            response.additional_kwargs["thinking_delta"] = new  # where LlamaIndex's agents look for it
    return response


def completion_response(text: str, delta: str | None, raw: dict[str, Any] | None) -> CompletionResponse:
    """Return a (partial) answer as a completion."""
    return CompletionResponse(text=text, delta=delta, raw=raw, logprobs=_logprobs(raw))


def _logprobs(raw: dict[str, Any] | None) -> list[list[LogProb]] | None:
    """Return each token of the answer, then its alternatives; None where they were not asked for."""
    if raw is None or "logprobs" not in raw:
        return None
    return [
        [LogProb(token=o["token"], logprob=o["logprob"], bytes=o["bytes"]) for o in (each, *each["top_logprobs"])]
        for each in raw["logprobs"]["content"]
    ]


@dataclass(frozen=True)
class Call:
    """One finished call of a CacheBlendLLM.

    Attributes:
        text: The answer.
        mode: ``"blend"`` or ``"prefill"``.
        reason: Why that mode, in words.
        usage: Token counts; see :func:`raw_of`.
        retrieved: What became of what was retrieved: counts, and the status of each chunk.
        raw: All that the response's `raw` holds.
    """

    text: str
    mode: str
    reason: str
    usage: dict[str, Any]
    retrieved: dict[str, Any]
    raw: dict[str, Any]


class UsageHandler(BaseEventHandler):
    """Collects what every CacheBlendLLM call reported, whatever chain made it. See :func:`collect_usage`."""

    _calls: list[Call] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the handler by."""
        return "CacheBlendUsageHandler"

    @property
    def calls(self) -> list[Call]:
        """Return the calls that have finished, in the order they did."""
        return self._calls

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take in one event."""
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

    A streamed call has finished when its last piece was read.
    """
    handler = UsageHandler()
    handlers = get_dispatcher().event_handlers
    handlers.append(handler)
    try:
        yield handler.calls
    finally:
        handlers[:] = [other for other in handlers if other is not handler]
