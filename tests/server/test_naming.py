"""Tests where the chunks named by a request are placed in its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, encoder_for, make_chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.server.naming import ChunkNaming, tokens_match
from tests.conftest import tokenizer_named

TOKENIZER = tokenizer_named("byte_level")
CHUNKS = [make_chunk(f"Chunk number {i} of the harbour.", TOKENIZER) for i in range(4)]
IDS = [chunk.id for chunk in CHUNKS]


def naming() -> tuple[ChunkNaming, list[Chunk]]:
    noted: list[Chunk] = []
    registry = ChunkRegistry(CHUNKS)

    def note(chunk: Chunk) -> None:
        noted.append(chunk)
        registry.add([chunk])

    return ChunkNaming(TOKENIZER, registry, note), noted


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=20)}),
    max_size=4,
)


def test_a_block_marked_for_caching_becomes_a_chunk() -> None:
    mark = {"type": "ephemeral"}
    given_text = "A handbook that every question comes with."
    blocks = [
        {"type": "text", "text": f"{given_text}\n", "cache_control": mark},
        {"type": "text", "text": CHUNKS[2].text, "cache_control": mark},
        {"type": "text", "text": "  ", "cache_control": mark},
        {"type": "text", "text": "Not marked.", "cache_control": None},
    ]
    mine, noted = naming()
    (message,), named = mine.messages([{"role": "user", "content": blocks}], ())
    assert named == (chunk_id(given_text), IDS[2])
    assert [block["text"] for block in message["content"]] == [block["text"] for block in blocks]
    assert not any("cache_control" in block for block in message["content"][:2])
    assert [chunk.text for chunk in noted] == [given_text]


@given(messages, st.lists(st.sampled_from(IDS), unique=True))
def test_named_chunks_go_once_and_in_order_before_the_last_user_message(chat: list[Any], ids: list[str]) -> None:
    users = [i for i, message in enumerate(chat) if message["role"] == "user"]
    if ids and not users:
        with pytest.raises(InputError, match="no user message"):
            naming()[0].messages(chat, ids)
        return
    found, named = naming()[0].messages(chat, ids)
    assert list(named) == ids
    texts = [chunk.text for name in ids for chunk in CHUNKS if chunk.id == name]
    for index, (before, after) in enumerate(zip(chat, found, strict=True)):
        is_last = bool(ids) and index == users[-1]
        assert after["content"] == ("\n\n".join([*texts, before["content"]]) if is_last else before["content"])
    assert naming()[0].messages(found, ids)[0] == found  # a second pass changes nothing


def test_blocks_lose_their_ids_and_get_their_chunks_text() -> None:
    given_text = "A text of the client's own, long enough."
    blocks = [
        {"type": "text", "text": "", "id": IDS[1]},
        {"type": "text", "text": f" {given_text}\n", "id": chunk_id(given_text)},
        {"type": "text", "text": "Not that chunk.", "id": IDS[2]},
        {"type": "image_url", "image_url": {"url": "x"}, "id": "kept"},
        {"type": "text", "text": "Who?"},
    ]
    mine, noted = naming()
    (message,), named = mine.messages([{"role": "user", "content": blocks}], ())
    assert [block.get("text") for block in message["content"]] == [
        CHUNKS[1].text,
        f" {given_text}\n",
        "Not that chunk.",
        None,
        "Who?",
    ]
    assert [block.get("id") for block in message["content"]] == [None, None, None, "kept", None]
    assert named == (IDS[1], chunk_id(given_text))
    assert [chunk.text for chunk in noted] == [given_text]
    assert blocks[0]["id"] == IDS[1]  # the request's own blocks stay unchanged


def test_a_text_under_a_foreign_id_is_no_chunk() -> None:
    block = {"type": "text", "text": "A text that nobody has registered.", "id": "nowhere"}
    mine, noted = naming()
    (message,), named = mine.messages([{"role": "user", "content": [block]}], ())
    assert (named, noted) == ((), [])
    assert message["content"] == [{"type": "text", "text": block["text"]}]


def test_a_named_chunk_split_over_two_blocks_is_inserted_whole() -> None:
    text = CHUNKS[1].text
    halves = [{"type": "text", "text": half} for half in (text[:9], text[9:])]
    (message,), _ = naming()[0].messages([{"role": "user", "content": halves}], [IDS[1]])
    assert [block["text"] for block in message["content"]] == [f"{text}\n\n", text[:9], text[9:]]


def test_tokens_of_a_text_with_blanks_around_it_match_no_chunk() -> None:
    for text in (" The harbour.", "The harbour.\n"):
        assert not tokens_match(TOKENIZER, text, tuple(encoder_for(TOKENIZER).document(text)))


def test_unknown_ids_are_refused_in_blocks_chat_lists_and_plain_prompts() -> None:
    for content, ids in [("x", ["nowhere"]), ([{"type": "text", "text": "", "id": "nowhere"}], [])]:
        with pytest.raises(UnknownChunkError, match="nowhere"):
            naming()[0].messages([{"role": "user", "content": content}], ids)
    with pytest.raises(UnknownChunkError, match="nowhere"):
        naming()[0].prompts("x", ["nowhere"])


def test_a_block_whose_id_is_no_unicode_is_refused() -> None:
    block = {"type": "text", "text": "Who?", "id": "\ud800"}
    with pytest.raises(InputError, match="not valid Unicode"):
        naming()[0].messages([{"role": "user", "content": [block]}], ())


def test_missing_named_chunks_are_put_before_plain_prompts() -> None:
    a, b = CHUNKS[:2]
    prompts = [f"{b.text} Who?", "Who?"]
    want = [f"{a.text}\n\n{b.text} Who?", f"{a.text}\n\n{b.text}\n\nWho?"]
    assert naming()[0].prompts(prompts, [a.id, b.id]) == (want, [[a], [a, b]])
    assert naming()[0].prompts(prompts[1], [a.id, b.id]) == (want[1], [[a, b]])
    for wrong in ([1, 2, 3], [[1], [2]], None):
        with pytest.raises(InputError, match="text"):
            naming()[0].prompts(wrong, [a.id])


@given(st.text(min_size=1, max_size=40))
def test_tokens_match_only_their_own_text(text: str) -> None:
    try:
        chunk = make_chunk(text, TOKENIZER)
    except InputError:
        return
    assert tokens_match(TOKENIZER, chunk.text, chunk.token_ids)
    assert not tokens_match(TOKENIZER, chunk.text + "x", chunk.token_ids)
    assert not tokens_match(TOKENIZER, f" {chunk.text}", chunk.token_ids)
    assert not tokens_match(TOKENIZER, chunk.text, (*chunk.token_ids, 400))
