"""Tests that what a vector store's documents hold is known to the engine, and forgotten when no document holds it any more."""

from __future__ import annotations

import gc

import pytest

from cacheblend_rag.frameworks import uses
from cacheblend_rag.frameworks.uses import StoreChunks, owner_of, read_ahead
from cacheblend_rag.prompts.chunk import chunk_id
from tests.fake_engine import FakeEngine

BELL = "The bell of Marlow was cast in 1822."
SHIP = "The ship was sold for timber in Oakcliff."


class Base:
    """A vector store, as far as this matters."""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def known(engine: FakeEngine, *texts: str) -> list[bool]:
    return [chunk_id(text) in engine.registry for text in texts]


def test_a_store_is_one_owner_while_it_lives() -> None:
    base, other = Base(), Base()
    assert owner_of(base, object) is owner_of(base, object) is not owner_of(other, object)
    key = id(base)
    del base
    gc.collect()
    assert key not in uses._owners


def test_a_text_is_forgotten_with_the_last_document_that_holds_it(engine: FakeEngine) -> None:
    one, two = (StoreChunks(engine, owner_of(base, object)) for base in (Base(), Base()))
    assert [chunk.text for chunk in one.hold([("a", [BELL]), (None, [SHIP])])] == [BELL, SHIP]
    two.hold([("a", [f"  {BELL}\n"])])
    one.release(["a"])
    assert known(engine, BELL, SHIP) == [True, True]
    two.hold([("a", [SHIP])])  # another text under the same id
    assert known(engine, BELL, SHIP) == [False, True]
    assert (one.names(), two.names()) == ([], ["a"])


def test_a_document_that_has_fewer_texts_than_before_lets_go_of_the_others(engine: FakeEngine) -> None:
    chunks = StoreChunks(engine, object())
    chunks.hold([("a", [f"{BELL} {SHIP}", SHIP])])
    chunks.hold([("a", [f"{BELL} {SHIP}"])])
    assert known(engine, f"{BELL} {SHIP}", SHIP) == [True, False]
    chunks.hold([("a", [])])
    assert known(engine, f"{BELL} {SHIP}") == [False]
    assert chunks.names() == []


def test_reading_ahead_does_not_disturb_who_asked_for_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[str]] = []

    def prefetch(names: list[str]) -> None:
        asked.append(names)
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine, "prefetch", prefetch)
    caplog.set_level("DEBUG", uses.__name__)
    chunks = StoreChunks(engine, object()).hold([("a", [BELL])])
    read_ahead(engine, [])
    read_ahead(engine, chunks)
    uses.READER.submit(lambda: None).result()
    assert asked == [[chunk_id(BELL)]]
    assert "could not be read ahead" in caplog.text
