"""Tests the thoughts of a model that thinks before it answers."""

from __future__ import annotations

import copy

import pytest
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.chat_engine import SimpleChatEngine
from scripted import ScriptedEngine

from cacheblend_rag import TransformersEngine
from llama_index_cacheblend import CacheBlendLLM

ANSWER = "Is it the keeper? Yes.\n</think>\n\nAda Brenmoor."
QUESTION = [ChatMessage("Who?")]
THINKS = (
    "{% for m in messages %}<<{{ m.role }}>>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}<<assistant>><think>\n"
)


@pytest.fixture
def thinker(engine: TransformersEngine) -> ScriptedEngine:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKS
    return ScriptedEngine(tokenizer, ANSWER)


def parts(response: ChatResponse) -> tuple[list[str | None], str | None]:
    """Return the content of the thinking blocks, and the text."""
    thoughts = [block.content for block in response.message.blocks if block.block_type == "thinking"]
    return thoughts, response.message.content


def thought(text: str) -> list[str]:
    return [text] if hasattr(types, "ThinkingBlock") else []  # the lowest version has no such block


async def test_thoughts_form_a_separate_block_and_the_content_is_the_answer(thinker: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=thinker)
    for said in (llm.chat(QUESTION), await llm.achat(QUESTION)):
        assert parts(said) == (thought("Is it the keeper? Yes."), "Ada Brenmoor.")
    llm.chat([*QUESTION, said.message, ChatMessage("Since when?")])
    assert ("<think>Is it the keeper? Yes.</think>Ada" in thinker.text_asked()) == bool(thought("any"))
    assert llm.complete("Who?").text == ANSWER, "a completion is what the model says"
    thinker.answer = "Is it the keeper? "
    assert parts(llm.chat(QUESTION)) == (thought("Is it the keeper?"), "")


async def test_a_stream_has_only_thinking_deltas_during_thoughts(thinker: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=thinker)
    for pieces in ([*llm.stream_chat(QUESTION)], [piece async for piece in await llm.astream_chat(QUESTION)]):
        first, last = pieces
        assert first.additional_kwargs == {"thinking_delta": "Is it the keeper? Yes."} and first.delta == ""
        assert last.additional_kwargs == {} and last.delta == "Ada Brenmoor."
        assert parts(last) == parts(llm.chat(QUESTION))


def test_a_chat_engine_returns_and_remembers_only_the_answer(thinker: ScriptedEngine) -> None:
    chat = SimpleChatEngine.from_defaults(llm=CacheBlendLLM(engine=thinker))
    assert str(chat.chat("Who?")) == "Ada Brenmoor."
    assert chat.chat_history[-1].content == "Ada Brenmoor."
    assert [*chat.stream_chat("Since when?").response_gen] == ["Ada Brenmoor."]
    assert chat.chat_history[-1].content == "Ada Brenmoor."
    *_, last = CacheBlendLLM(engine=thinker).stream_chat(QUESTION)
    last.message.content = "Another."  # chat engines before 0.14.25 do so
    assert parts(last) == (thought("Is it the keeper? Yes."), "Another.")
