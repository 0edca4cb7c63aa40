from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.registered import FILE_NAME, RegisteredChunks
from cacheblend_rag.retrieval.sqlite import chunk_row
from tests.retrieval.index_workers import chunk, chunks


def everything(kept: RegisteredChunks) -> list[Chunk]:
    return kept.named_after("", 100)


def change(directory: Path, statement: str) -> None:
    with sqlite3.connect(directory / FILE_NAME) as database:
        database.execute(statement)
    database.close()


def test_chunks_are_kept_for_their_model_with_text_tokens_and_metadata(tmp_path: Path) -> None:
    first, other = RegisteredChunks(tmp_path, "one"), RegisteredChunks(tmp_path, "two")
    made = chunk("Grüße — 你好 🎉", "/a", 7)
    first.add([made])
    other.add(chunks("other"))
    second = RegisteredChunks(tmp_path, "one")
    assert everything(second) == [made] and everything(second)[0].metadata == made.metadata
    second.remove([made.id, "unknown"])
    assert everything(first) == [] and everything(other) == chunks("other")


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = RegisteredChunks(None, "one")
    kept.add(chunks("text"))
    assert everything(kept) == chunks("text") and everything(RegisteredChunks(None, "one")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("column", ["token_ids = x'01'", "token_ids = 'text'", "metadata = 'no json'"])
def test_a_chunk_that_cannot_be_read_says_how_to_start_over(tmp_path: Path, column: str) -> None:
    kept = RegisteredChunks(tmp_path, "one")
    kept.add(chunks("text"))
    change(tmp_path, f"UPDATE chunks SET {column}")
    with pytest.raises(StoreError, match=r"registered\.sqlite is damaged .*delete it"):
        everything(kept)


def test_a_file_of_another_format_or_program_is_refused(tmp_path: Path) -> None:
    RegisteredChunks(tmp_path, "one").close()
    change(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="format 99"):
        RegisteredChunks(tmp_path, "one")
    change(tmp_path, "PRAGMA user_version = 0")
    with pytest.raises(StoreError, match="not a file of registered chunks"):
        RegisteredChunks(tmp_path, "one")


def test_a_file_of_format_1_is_brought_up_to_date_with_all_it_holds(tmp_path: Path) -> None:
    made = [chunk("The first chunk, registered long ago."), chunk("Grüße — 你好 🎉, and some more.", "/a", 7)]
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute(
            "CREATE TABLE chunks (name TEXT NOT NULL, model TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, "
            "metadata TEXT NOT NULL, PRIMARY KEY (model, name)) WITHOUT ROWID"
        )
        for model in ("one", "two"):
            for name, text, token_ids, metadata, _ in map(chunk_row, made):
                database.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", (name, model, text, token_ids, metadata))
        database.execute("PRAGMA user_version = 1")
    database.close()
    kept = RegisteredChunks(tmp_path, "one")
    registry = ChunkRegistry()
    registry.attach(kept)
    assert sorted(c.id for c in registry) == sorted(c.id for c in made) and len(registry) == 2
    assert registry.find("".join(c.text for c in made)) == made
    assert dict(registry.get(made[1].id).metadata) == dict(made[1].metadata)


def test_a_chunk_registered_in_place_of_the_newest_is_seen_by_others(tmp_path: Path) -> None:
    one, two = RegisteredChunks(tmp_path, "one"), RegisteredChunks(tmp_path, "one")
    registry = ChunkRegistry()
    one.add(chunks("The text that is registered first."))
    registry.attach(two)
    one.remove([c.id for c in everything(one)])
    one.add(chunks("The text that took its place."))
    registry.follow()
    assert registry.find("The text that took its place.") == chunks("The text that took its place.")
