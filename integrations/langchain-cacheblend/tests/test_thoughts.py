"""Tests the thoughts of a model that thinks before it answers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from test_tools import Place, search

from langchain_cacheblend import CacheBlendLLM, ChatCacheBlend

from scripted import TEMPLATE, ScriptedEngine

ANSWER = "Is it the keeper? Yes.\n</think>\n\nAda Brenmoor."
CALL = '<tool_call>{"name": "search", "arguments": {"query": "Ada"}}</tool_call>'
# Qwen3's template does so: it renders thoughts after the last question, when the model continues with its tools'
# results.
THINKS = TEMPLATE.replace("<<assistant>>", "<<assistant>><think>\n").replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}",
)


@pytest.fixture
def thinker() -> ScriptedEngine:
    engine = ScriptedEngine(answer=ANSWER)
    engine.tokenizer.add_tokens(["<think>", "</think>"])
    engine.tokenizer.chat_template = THINKS
    return engine


class Heard(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


async def test_thoughts_are_reasoning_content_and_the_content_is_the_answer(thinker: ScriptedEngine) -> None:
    llm = ChatCacheBlend(engine=thinker)
    for said in (llm.invoke("Who?"), await llm.ainvoke("Who?")):
        assert said.content == "Ada Brenmoor."
        assert said.additional_kwargs == {"reasoning_content": "Is it the keeper? Yes."}
        assert [block["type"] for block in said.content_blocks] == ["reasoning", "text"]
    assert CacheBlendLLM(engine=thinker).invoke("Who?") == ANSWER, "a text model's text is what the model says"


async def test_a_stream_has_reasoning_content_during_thoughts_and_its_callbacks_get_no_text(
    thinker: ScriptedEngine,
) -> None:
    llm, heard = ChatCacheBlend(engine=thinker), Heard()
    whole = llm.invoke("Who?")
    for chunks in (
        [*llm.stream("Who?", {"callbacks": [heard]})],
        [chunk async for chunk in llm.astream("Who?")],
    ):
        kinds = ["r" * ("reasoning_content" in c.additional_kwargs) + "a" * bool(c.content) for c in chunks]
        assert "".join(kinds) == "rrrraaa"
        joined = sum(chunks[1:], chunks[0])
        assert isinstance(joined, AIMessageChunk)
        assert (joined.content, joined.additional_kwargs) == (whole.content, whole.additional_kwargs)
    assert "".join(heard.tokens) == "Ada Brenmoor."


def test_unfinished_thoughts_are_no_answer(thinker: ScriptedEngine) -> None:
    thinker.answer = "Is it the keeper? "
    said = ChatCacheBlend(engine=thinker).invoke("Who?")
    assert (said.content, said.additional_kwargs["reasoning_content"]) == ("", "Is it the keeper?")


def test_calls_are_parsed_after_thoughts_and_the_thoughts_are_sent_back_with_the_tools_answer(
    thinker: ScriptedEngine,
) -> None:
    thinker.answer = f"Not {CALL} yet.</think>\n\n{CALL}"
    said = ChatCacheBlend(engine=thinker).bind_tools([search]).invoke("Who?")
    assert [call["args"] for call in said.tool_calls] == [{"query": "Ada"}]
    assert (said.content, said.additional_kwargs["reasoning_content"]) == ("", f"Not {CALL} yet.")
    found = ToolMessage("Ada Brenmoor.", tool_call_id=said.tool_calls[0]["id"])
    ChatCacheBlend(engine=thinker).invoke([HumanMessage("Who?"), said, found])
    assert f"<<assistant>><think>Not {CALL} yet.</think>" in str(thinker.prompts[-1].segments[-1])


def test_structured_output_is_not_taken_for_thoughts_opened_by_the_prompt(thinker: ScriptedEngine) -> None:
    thinker.answer = None
    for method in ("json_schema", "function_calling"):
        found = ChatCacheBlend(engine=thinker).with_structured_output(Place, method=method).invoke("What of 'Marlow'?")
        assert found == Place(city="Marlow")


def test_the_text_of_a_model_without_thinking_tokens_stays_unchanged() -> None:
    said = ChatCacheBlend(engine=ScriptedEngine(answer=f"<think>{ANSWER}")).invoke("Who?")
    assert (said.content, said.additional_kwargs) == (f"<think>{ANSWER}", {})
    assert AIMessage(said.content).content_blocks == said.content_blocks
