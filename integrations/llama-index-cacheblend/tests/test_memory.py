"""Tests that chat engines and their memories let earlier turns come from the prefix cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer, Memory
from scripted import ScriptedEngine

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_questions
from llama_index_cacheblend import CacheBlendChatEngine, CacheBlendLLM, collect_usage

QUESTIONS = [question.question for question in bundled_questions()[:5]]


@pytest.fixture
def block(engine: BlendEngine) -> int:
    """Return how many tokens may be computed again at the end of a cached prefix."""
    return 4 if isinstance(engine, TransformersEngine) else 128


@pytest.fixture
def llm(engine: BlendEngine) -> CacheBlendLLM:
    engine.reset_prefix_cache()
    return CacheBlendLLM(engine=engine, max_tokens=10, ratio=0.15)


def usages(chat: Any) -> list[dict[str, Any]]:
    """Return the usage of the last call of each turn."""
    found = []
    for question in QUESTIONS:
        with collect_usage() as calls:
            chat.chat(question)
        found.append(calls[-1].usage)
    return found


def over(index: VectorStoreIndex, llm: CacheBlendLLM, **options: Any) -> CacheBlendChatEngine:
    memory = Memory.from_defaults(token_limit=4000)
    return CacheBlendChatEngine.from_index(
        index, llm=llm, similarity_top_k=2, skip_condense=True, memory=memory, **options
    )


def test_a_chat_without_notes_computes_only_new_tokens(llm: CacheBlendLLM, block: int) -> None:
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=ChatMemoryBuffer.from_defaults(token_limit=4000))
    for before, after in pairwise(usages(chat)):
        assert after["kept_tokens"] > before["prompt_tokens"] - max(block, 16)  # fewer are computed again


def test_a_chat_over_an_index_has_all_but_the_last_exchange_cached(
    llm: CacheBlendLLM, index: VectorStoreIndex, block: int
) -> None:
    chat = over(index, llm)
    seen = usages(chat)
    history = chat.chat_history
    for turn, usage in enumerate(seen[2:], 2):
        said = "".join(str(message.content) for message in history[: 2 * turn - 2])
        assert usage["kept_tokens"] > len(llm.tokenizer(said)) - block


def test_notes_in_the_system_message_keep_the_history_behind_them_uncached(
    llm: CacheBlendLLM, index: VectorStoreIndex
) -> None:
    prompt = "Notes:\n\n{context_str}\n\nAnswer from them."
    seen = usages(over(index, llm, context_prompt=prompt))
    assert [usage["kept_tokens"] for usage in seen] == [0] * len(QUESTIONS)
    text = [usage["computed_tokens"] - usage["recomputed_tokens"] for usage in seen]
    assert text == sorted(text) and text[-1] > text[0] + 40


def test_a_cached_chat_answers_as_full_recompute(
    llm: CacheBlendLLM, engine: BlendEngine, index: VectorStoreIndex
) -> None:
    kept = over(index, CacheBlendLLM(engine=engine, max_tokens=10, ratio=1.0))
    whole = over(index, CacheBlendLLM(engine=engine, max_tokens=10, quality="full"))
    for question in QUESTIONS:
        assert str(kept.chat(question)) == str(whole.chat(question))


def test_a_long_conversation_leaves_room_for_the_notes(engine: BlendEngine, index: VectorStoreIndex) -> None:
    scripted = ScriptedEngine(engine.tokenizer, "The harbour was built by Ada Brenmoor in 1911. " * 15, window=2048)
    llm = CacheBlendLLM(engine=scripted, set_tokenizer=False)
    chat = CacheBlendChatEngine.from_index(index, llm=llm, similarity_top_k=2, skip_condense=True)
    for turn in range(12):
        chat.chat(f"And what of bell number {turn}?")
    assert len(scripted.asked) == 12
    assert len(chat.chat_history) > 2
    begun = CacheBlendChatEngine.from_index(index, llm=llm, chat_history=chat.chat_history[:2])
    assert begun.chat_history == chat.chat_history[:2]
