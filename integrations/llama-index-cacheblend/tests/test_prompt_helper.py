"""Tests packing of prompts: no text lost, no needless cut, no prompt over the window."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode
from scripted import ScriptedEngine

from cacheblend_rag import InputError, TransformersEngine, chat_prompt, make_chunk
from llama_index_cacheblend import CacheBlendLLM, ChunkPreservingPromptHelper, collect_usage, node_text, use_engine

TEMPLATE = PromptTemplate("Notes:\n{context_str}\n\nQuestion: {query_str}")
WORDS = [
    "harbour",
    "bell",
    "tower",
    "lens",
    "ship",
    "captain",
    "weaver",
    "rose",
    "tobacco",
    "sculptor",
    "dawn",
    "north",
    "wind",
]


def helper(engine: Any, window: int, num_output: int = 16, **options: Any) -> ChunkPreservingPromptHelper:
    return ChunkPreservingPromptHelper(engine, num_output, context_window=window, **options)


def texts_of(sizes: list[int]) -> list[str]:
    return [
        " ".join(f"{WORDS[(n * 7 + i) % len(WORDS)]}{'.' if i % 9 == 8 else ''}" for i in range(size)) + f" End {n}."
        for n, size in enumerate(sizes)
    ]


_tokenizer: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _the_tokenizer(engine: TransformersEngine) -> None:
    _tokenizer[:] = [engine.tokenizer]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), window=st.integers(220, 600))
def test_the_helper_packs_whole_chunks_in_order_within_the_window(sizes: list[int], window: int) -> None:
    engine = ScriptedEngine(_tokenizer[0], window=window)
    chunks = [make_chunk(text, engine.tokenizer) for text in texts_of(sizes)]
    engine.registry.add(chunks)
    packed = helper(engine, window).repack(TEMPLATE, [chunk.text for chunk in chunks])
    assert "\n\n".join(packed) == "\n\n".join(chunk.text for chunk in chunks)
    for text in packed:
        prompt = chat_prompt(
            engine.tokenizer,
            [{"role": "user", "content": TEMPLATE.format(context_str=text, query_str="")}],
            engine.registry,
        )
        assert len(engine.tokenize(prompt).token_ids) + 16 <= window
    # The prompts are as few as possible: no text would have fitted behind the one before it.
    room = helper(engine, window)._get_available_chunk_size(TEMPLATE)
    for one, other in pairwise(packed):
        first = next(chunk for chunk in chunks if other.startswith(chunk.text))
        assert helper(engine, window)._size(f"{one}\n\n{first.text}") > room


def test_llama_indexs_helper_cuts_through_the_same_chunks(engine: TransformersEngine, nodes: list[BaseNode]) -> None:
    texts = [node_text(node) for node in nodes[:8]]
    llm = CacheBlendLLM(engine=engine)
    theirs = PromptHelper(context_window=500, num_output=16, tokenizer=llm.tokenizer).repack(TEMPLATE, texts)
    ours = helper(engine, 500).repack(TEMPLATE, texts)
    assert sum(any(text in packed for packed in ours) for text in texts) == len(texts)
    assert sum(any(text in packed for packed in theirs) for text in texts) < len(texts)


def test_texts_joined_earlier_are_divided_between_chunks(engine: TransformersEngine, nodes: list[BaseNode]) -> None:
    """Refine packs its context again when the existing answer leaves less room."""
    texts = [node_text(node) for node in nodes[:4]]
    joined = "Some words before.\n\n" + "\n\n".join(texts) + "\n\nSome words behind."
    packed = helper(engine, 520).repack(TEMPLATE, [joined])
    assert len(packed) > 1
    assert all(any(text in one for one in packed) for text in texts)
    assert "".join("".join(packed).split()) == "".join(joined.split())


def test_a_chunk_longer_than_the_window_is_cut_without_loss(engine: TransformersEngine) -> None:
    (long,) = texts_of([700])
    engine_ = ScriptedEngine(engine.tokenizer)
    engine_.registry.add([make_chunk(long, engine.tokenizer)])
    packed = helper(engine_, 300, chunk_overlap_ratio=0.0).repack(TEMPLATE, [long])
    assert len(packed) > 2
    assert " ".join(packed).split() == long.split()


def test_truncation_leaves_whole_chunks_from_the_front(engine: TransformersEngine, nodes: list[BaseNode]) -> None:
    texts = [node_text(node) for node in nodes[:6]]
    (kept,) = helper(engine, 700).truncate(TEMPLATE, ["\n".join(texts)])
    count = sum(text in kept for text in texts)
    assert 1 <= count < 6
    assert kept == "\n".join(texts[:count])
    assert helper(engine, 8192).truncate(TEMPLATE, texts) == texts
    assert helper(engine, 8192).truncate(TEMPLATE, []) == []


def test_room_is_left_for_the_chat_template(engine: TransformersEngine) -> None:
    chatty = ScriptedEngine(engine.tokenizer)
    plain = helper(chatty, 500)._get_available_chunk_size(TEMPLATE)
    theirs = PromptHelper(context_window=500, num_output=16, tokenizer=CacheBlendLLM(engine=chatty).tokenizer)
    assert 0 < theirs._get_available_chunk_size(TEMPLATE) - plain < 20


def test_a_helper_needs_an_engine(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="engine"):
        ChunkPreservingPromptHelper.from_llm_metadata(CacheBlendLLM(engine=engine).metadata)
    with pytest.raises(ValueError, match="not"):
        helper(engine, 20, 16).repack(TEMPLATE, ["text"])


def test_an_unchanged_query_engine_refines_over_whole_chunks_beyond_the_window(
    engine: TransformersEngine, index: VectorStoreIndex
) -> None:
    llm = use_engine(engine, max_tokens=4)
    assert Settings.llm is llm
    assert Settings.prompt_helper.num_output == 4
    Settings.prompt_helper = ChunkPreservingPromptHelper(engine, 4, context_window=1400)
    with collect_usage() as calls:
        response = index.as_query_engine(similarity_top_k=8).query("Who is the captain?")
    assert len(calls) > 1
    assert all(call.mode == "blend" for call in calls)
    counts = [call.reason.split()[3:6] for call in calls]
    assert all(have == of for have, _, of in counts)
    assert sum(int(have) for have, _, of in counts) == len(response.source_nodes) == 8
