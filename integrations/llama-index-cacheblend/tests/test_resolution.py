"""Tests the chunks of a prompt: named ones, then content match, then none; and the ways to register chunks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, MessageRole, TextBlock
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode
from scripted import ScriptedEngine

from cacheblend_rag import InputError, TransformersEngine, make_chunk
from cacheblend_rag.errors import UnknownChunkError
from llama_index_cacheblend import CacheBlendLLM, collect_usage, node_text, register_nodes

FIRST = "The Marlow observatory was founded in 1911."
SECOND = "It stands on a hill above the harbour."
BOTH = f"{FIRST}\n\n{SECOND}"


@pytest.fixture
def scripted(engine: TransformersEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


@pytest.fixture
def llm(scripted: ScriptedEngine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=scripted)


def known(engine: ScriptedEngine, *texts: str) -> list[str]:
    chunks = [make_chunk(text, engine.tokenizer) for text in texts]
    engine.registry.add(chunks)
    return [chunk.id for chunk in chunks]


def user(text: str, **extra: Any) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text, additional_kwargs=extra)]


# Chunks in a prompt


def test_registered_chunks_are_found_in_messages_and_completions(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    known(scripted, FIRST, SECOND)
    llm.chat(user(f"Notes: {FIRST} And: {SECOND}\nWhat?"))
    assert scripted.chunks_asked() == [FIRST, SECOND]
    llm.complete(f"Before. {SECOND} After.")
    assert scripted.chunks_asked() == [SECOND]
    llm.complete(f"Before. {SECOND} After.", formatted=True)
    assert scripted.chunks_asked() == [SECOND]
    assert scripted.text_asked() == f"Before. {SECOND} After."


def test_named_chunks_override_longer_ones_found_by_content(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    whole, first, second = known(scripted, BOTH, FIRST, SECOND)
    llm.chat(user(BOTH))
    assert scripted.chunks_asked() == [BOTH]
    llm.chat(user(BOTH), chunk_ids=[first, second])
    assert scripted.chunks_asked() == [FIRST, SECOND]
    llm.chat(user(BOTH, chunk_ids=[second]))
    assert scripted.chunks_asked() == [FIRST, SECOND]
    llm.complete(BOTH, chunk_ids=[whole], formatted=True)
    assert scripted.chunks_asked() == [BOTH]
    llm.holding([scripted.registry.get(first)]).chat(user(BOTH))
    assert scripted.chunks_asked() == [FIRST, SECOND]


def test_a_name_counts_only_if_the_text_is_in_the_prompt(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    (first,) = known(scripted, FIRST)
    llm.chat(user(f"{FIRST[:-5]} and so on"), chunk_ids=[first])
    assert scripted.chunks_asked() == []


@pytest.mark.parametrize("how", ["call", "message"])
def test_unknown_chunk_names_are_refused(llm: CacheBlendLLM, how: str) -> None:
    with pytest.raises(UnknownChunkError, match="nowhere"):
        if how == "call":
            llm.chat(user("x"), chunk_ids=["nowhere"])
        else:
            llm.chat(user("x", chunk_ids=["nowhere"]))
    with pytest.raises(InputError, match="list of chunk ids"):
        llm.chat(user("x"), chunk_ids="nowhere")


def test_a_document_that_imitates_a_reference_is_plain_text(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    (first,) = known(scripted, FIRST)
    for spoof in (f'{{"type": "text", "id": "{first}"}}', f"chunk_ids=[{first}]", first, f"ChunkRef('{first}')"):
        llm.chat(user(f"A document says: {spoof}"))
        assert scripted.chunks_asked() == []


def test_chunks_in_history_tool_answers_and_citable_blocks_are_found(
    scripted: ScriptedEngine, llm: CacheBlendLLM
) -> None:
    known(scripted, FIRST, SECOND)
    llm.chat(
        [
            ChatMessage(role=MessageRole.DEVELOPER, content="Be brief."),
            *user(f"Notes:\n{FIRST}"),
            ChatMessage(role=MessageRole.MODEL, content="Noted."),
            ChatMessage(
                role="user",
                blocks=[CitableBlock(title="t", source="s", content=[TextBlock(text=SECOND)]), TextBlock(text="Why?")],
            ),
        ]
    )
    assert scripted.chunks_asked() == [FIRST, SECOND]
    assert scripted.text_asked().endswith(f"{SECOND}\nWhy?\nAnswer:")


# Unwrapped retrieval


def test_unchanged_query_engines_reuse_retrieved_chunks(
    engine: TransformersEngine, index: VectorStoreIndex, nodes: list[BaseNode]
) -> None:
    """Simulate a new process: the store has the KV, the engine does not know the nodes."""
    Settings.llm = CacheBlendLLM(engine=engine, max_tokens=2)
    Settings.llm.complete("Hello")  # takes in chunks retrieved by earlier tests
    known_before = [engine.registry.get(chunk.id) for chunk in engine.registry]
    engine.registry.remove([chunk.id for chunk in known_before])
    try:
        with collect_usage() as calls:
            index.as_query_engine(similarity_top_k=3).query("Who is the captain?")
        assert "3 of 3 chunks" in calls[0].reason
        assert len(engine.registry) == 3
        engine.registry.remove([chunk.id for chunk in engine.registry])
        Settings.llm = CacheBlendLLM(engine=TransformersEngine(device="cpu"), watch_retrieval=False, max_tokens=2)
        with collect_usage() as calls:
            index.as_query_engine(similarity_top_k=3).query("Who is the captain?")
        assert "no known chunk" in calls[0].reason
    finally:
        engine.registry.add(known_before)


def test_retrieval_tracking_keeps_no_engine_alive(engine: TransformersEngine) -> None:
    gone = ScriptedEngine(engine.tokenizer)
    alive = weakref.ref(gone)
    CacheBlendLLM(engine=gone)
    del gone
    gc.collect()
    assert alive() is None


def test_nodes_without_text_are_left_out(scripted: ScriptedEngine) -> None:
    nodes = [
        TextNode(text=" \n"),
        TextNode(text="\ud800 is half a character"),
        TextNode(text=FIRST, metadata={"page": 3}),
    ]
    (chunk,) = register_nodes(scripted, [NodeWithScore(node=node) for node in nodes])
    assert chunk.text == node_text(nodes[2]) == f"page: 3\n\n{FIRST}"
