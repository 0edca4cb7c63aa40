"""LangChain's standard tests of chat models.

On the bundled model: all that a small model without tools can do. On the scripted engine, which conforms to schemas and calls
tools by rule: every feature that this package claims, whatever the model's skill. And on a model that has learnt by heart what
the scripted engine says: the same on real engines, which render, decode, guide and stream.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cacheblend_rag import BlendEngine, make_chunk
from langchain_cacheblend import ChatCacheBlend

from scripted import ScriptedEngine

NOTES = "The harbour of Marlow is very old. It was built by Ada Brenmoor in 1911, who lived above the mill."
NEW_NOTES = "The mill of Marlow is not as old as its harbour, {}. Ada Brenmoor built it, too."
USAGE = ["cache_read_input", "cache_creation_input"]


def _ask(model: ChatCacheBlend, notes: str, stream: bool) -> AIMessage:
    block = {"type": "text", "text": notes, "id": make_chunk(notes, model.engine.tokenizer).id}
    messages = [("human", [block, "\n\nQuestion: Who built it?"])]
    if not stream:
        return model.invoke(messages)
    full: AIMessageChunk | None = None
    for chunk in model.stream(messages):
        full = chunk if full is None else full + chunk  # type: ignore[assignment]
    assert full is not None
    return full


class CacheUsage:
    """Implements the suite's hooks for cache usage, with further assertions."""

    engine: Any

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatCacheBlend(engine=self.engine, max_tokens=8)
        chunk = make_chunk(NOTES, self.engine.tokenizer)
        self.engine.precompute([chunk])
        message = _ask(model, NOTES, stream)
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] + details["recomputed"] >= len(chunk.token_ids)
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatCacheBlend(engine=self.engine, max_tokens=8)
        notes = NEW_NOTES.format(f"says {type(self).__name__} {stream}")
        message = _ask(model, notes, stream)
        size = len(make_chunk(notes, self.engine.tokenizer).token_ids)
        assert message.usage_metadata["input_token_details"]["cache_creation"] == size
        self.engine.flush()
        assert _ask(model, notes, stream).usage_metadata["input_token_details"]["cache_creation"] == 0
        return message


class OnBundledModel:
    @pytest.fixture(autouse=True)
    def _engine(self, engine: BlendEngine) -> None:
        self.engine = engine

    @property
    def chat_model_class(self) -> type[ChatCacheBlend]:
        return ChatCacheBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def supports_model_override(self) -> bool:
        return False  # an engine runs one model

    @property
    def has_tool_calling(self) -> bool:
        return False  # the bundled model's template has no place for tools

    @property
    def has_structured_output(self) -> bool:
        return False  # guided, so small a model fills a string without end

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": USAGE, "stream": USAGE}


class OnScriptedEngine(OnBundledModel):
    @pytest.fixture(autouse=True)
    def _engine(self, scripted: ScriptedEngine) -> None:
        self.engine = scripted

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class OnTaughtModel(OnScriptedEngine):
    @pytest.fixture(autouse=True)
    def _engine(self, taught_engine: BlendEngine) -> None:
        self.engine = taught_engine


class TestUnitBundled(OnBundledModel, ChatModelUnitTests):
    pass


class TestUnitScripted(OnScriptedEngine, ChatModelUnitTests):
    pass


class TestUnitTaught(OnTaughtModel, ChatModelUnitTests):
    pass


class TestIntegrationBundled(OnBundledModel, CacheUsage, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 8}


class TestIntegrationScripted(OnScriptedEngine, CacheUsage, ChatModelIntegrationTests):
    pass


class TestIntegrationTaught(OnTaughtModel, CacheUsage, ChatModelIntegrationTests):
    pass


class TestStructuredOutputByFunctionCalling(OnScriptedEngine, CacheUsage, ChatModelIntegrationTests):
    """Runs the integration tests again, with tool calls in place of JSON answers."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
