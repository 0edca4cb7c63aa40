"""Tests that the engine knows the texts of a vector store's documents, and forgets a text that no document has any more."""

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
    """A stand-in for a vector store."""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def known(engine: FakeEngine, *texts: str) -> list[bool]:
    return [chunk_id(text) in engine.registry for text in texts]


def test_a_vector_store_has_one_owner_until_it_is_garbage_collected() -> None:
    base, other = Base(), Base()
    assert owner_of(base, object) is owner_of(base, object) is not owner_of(other, object)
    key = id(base)
    del base
    gc.collect()
    assert key not in uses._owners


def test_a_text_is_forgotten_with_its_last_document(engine: FakeEngine) -> None:
    one, two = (StoreChunks(engine, owner_of(base, object)) for base in (Base(), Base()))
    assert [chunk.text for chunk in one.hold([("a", [BELL]), (None, [SHIP])])] == [BELL, SHIP]
    two.hold([("a", [f"  {BELL}\n"])])
    one.release(["a"])
    assert known(engine, BELL, SHIP) == [True, True]
    two.hold([("a", [SHIP])])  # a different text under the id of the first
    assert known(engine, BELL, SHIP) == [False, True]
    assert (one.names(), two.names()) == ([], ["a"])


def test_texts_that_a_document_no_longer_has_are_forgotten(engine: FakeEngine) -> None:
    chunks = StoreChunks(engine, object())
    chunks.hold([("a", [f"{BELL} {SHIP}", SHIP])])
    chunks.hold([("a", [f"{BELL} {SHIP}"])])
    assert known(engine, f"{BELL} {SHIP}", SHIP) == [True, False]
    chunks.hold([("a", [])])
    assert known(engine, f"{BELL} {SHIP}") == [False]
    assert chunks.names() == []


def test_an_error_while_reading_ahead_is_logged_and_not_raised(
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
