"""Tests the effects of forgetting a chunk."""

from __future__ import annotations

from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from tests.fake_engine import FakeEngine


def test_forgetting_one_of_two_ids_with_equal_text_leaves_the_kv_of_the_second_id() -> None:
    engine = FakeEngine()
    first = make_chunk("The harbour's log, entry number one.", engine.tokenizer)
    second = Chunk("another-id", first.text, first.token_ids)
    engine.precompute([first, second])
    assert engine.forget([first]) == 0
    assert engine.store.contains(engine.key(second))
    assert engine.registry.find(f"See: {first.text}") == ["See: ", second]
    assert engine.forget(["another-id"]) == 1
    assert not engine.store.contains(engine.key(second))
