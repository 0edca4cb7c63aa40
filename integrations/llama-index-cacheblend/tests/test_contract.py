"""Runs the LLM contract for our LLM, LlamaIndex's mock, and our LLM as a text LLM."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.llms import LLM, MockLLM
from llm_contract import LLMContract

from cacheblend_rag import TransformersEngine
from llama_index_cacheblend import CacheBlendLLM


class TestMockLLM(LLMContract):
    """Checks the suite: LlamaIndex's mock passes all tests that a mock claims."""

    claims_cumulative_streams = False
    claims_usage = claims_sampling = claims_model_name = claims_free_event_loop = claims_refusals = False
    claims_one_event_per_call = False  # its chat makes a completion inside
    chat_is_chat = False

    def make(self, **options: Any) -> LLM:
        return MockLLM(**options)


class MockChatLLM(MockLLM):
    """Replaces the lowest supported version's mock, which cannot be a chat model."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True)


class TestMockChatLLM(TestMockLLM):
    chat_is_chat = True

    def make(self, **options: Any) -> LLM:
        return MockChatLLM(**options)


class TestCacheBlendLLM(LLMContract):
    @pytest.fixture(autouse=True)
    def _engine(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def make(self, **options: Any) -> LLM:
        return CacheBlendLLM(engine=self.engine, **{"max_tokens": 8, **options})


class TestCacheBlendLLMAsTextLLM(TestCacheBlendLLM):
    def make(self, **options: Any) -> LLM:
        return super().make(is_chat_model=False, **options)


class Forgetful(MockLLM):
    """Streams all but the last piece."""

    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return iter(list(super().stream_chat(messages, **kwargs))[:-1])


class Moody(MockLLM):
    """Answers differently when asked again, and when asked asynchronously."""

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        return self.chat([ChatMessage(role="user", content="something else")])


class Meddler(MockLLM):
    """Rewrites the messages it is given."""

    def chat(self, messages: Any, **kwargs: Any) -> Any:
        for message in messages:
            message.content = "meddled"
        return super().chat(messages, **kwargs)


class Deaf(MockLLM):
    """Loses the system prompt."""

    def _extend_prompt(self, formatted_prompt: str) -> str:
        return formatted_prompt


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_streamed_chat_adds_up"),
        (Moody, "test_async_chat_agrees"),
        (Moody, "test_calls_side_by_side_do_not_mix"),
        (Meddler, "test_messages_are_left_as_they_were"),
        (Deaf, "test_the_system_prompt_reaches_the_model"),
    ],
)
async def test_the_suite_detects_a_broken_llm(broken: type[MockLLM], test: str) -> None:
    suite = TestMockLLM()
    suite.make = broken  # type: ignore[method-assign]
    method = getattr(suite, test)
    with pytest.raises(AssertionError):
        result = method(
            *([suite.make()] if "llm" in method.__code__.co_varnames[: method.__code__.co_argcount] else [])
        )
        if result is not None:
            await result
