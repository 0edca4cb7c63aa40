"""Holds the shared parts of the LLM contract: messages, prompts, claims, and ways to run and overhear an LLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import LLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from pydantic import BaseModel

USER = [ChatMessage(role="user", content="Question: Who is the captain of the Lonely Tide?")]
TALK = [
    ChatMessage(role="system", content="Answer from the notes."),
    ChatMessage(role="user", content="Question: Who sails?"),
    ChatMessage(role="assistant", content="Celia Ulvik"),
    ChatMessage(role="user", content="Question: On which ship?"),
]
ODD = {
    "unicode": [ChatMessage(role="user", content="Où est le café? 港はどこ 🚢 \u202e")],
    "two user messages in a row": [USER[0], ChatMessage(role="user", content="And when?")],
    "assistant last": TALK[:3],
    "several text blocks": [ChatMessage(role="user", blocks=[TextBlock(text="One."), TextBlock(text="Two.")])],
    "braces": [ChatMessage(role="user", content="{query_str} {0} {{x}} %s")],
    "an empty assistant turn": [USER[0], ChatMessage(role="assistant", content=""), USER[0]],
}
PROMPTS = {
    "text": PromptTemplate("Notes: {notes}\n\nQuestion: {query_str}"),
    "chat": ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="Answer from {notes}."),
            ChatMessage(role=MessageRole.USER, content="Question: {query_str}"),
        ]
    ),
}
ARGS = {"notes": "The Lonely Tide sails.", "query_str": "Who sails?"}


class Ship(BaseModel):
    name: str
    year: int


class ContractBase:
    claims_cumulative_streams = True
    claims_usage = True
    claims_sampling = True
    claims_model_name = True
    claims_free_event_loop = True
    claims_refusals = True
    claims_one_event_per_call = True
    chat_is_chat = True

    def make(self, **options: Any) -> LLM:
        raise NotImplementedError

    @pytest.fixture
    def llm(self) -> LLM:
        return self.make()


class _Recorder(BaseEventHandler):
    seen: Any

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)


class events_of:
    def __init__(self, llm: LLM, seen: list[Any]):
        self.handler = _Recorder(seen=[])
        self.out = seen

    def __enter__(self) -> None:
        get_dispatcher().event_handlers.append(self.handler)

    def __exit__(self, *exc: object) -> None:
        get_dispatcher().event_handlers.remove(self.handler)
        self.out.extend(self.handler.seen)


def run(llm: LLM, method: str) -> None:
    out = getattr(llm, method)(USER if "chat" in method else "Question: Who?")
    if isinstance(out, Iterator):
        list(out)


async def arun(llm: LLM, method: str) -> None:
    out = await getattr(llm, method)(USER if "chat" in method else "Question: Who?")
    if "stream" in method:
        async for _ in out:
            pass
