from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError, StoreMismatchError
from cacheblend_rag.retrieval.registered import FILE_NAME, RegisteredChunks
from tests.retrieval.index_workers import chunk, chunks


def change(directory: Path, statement: str) -> None:
    with sqlite3.connect(directory / FILE_NAME) as database:
        database.execute(statement)
    database.close()


def test_chunks_are_kept_for_their_model_with_text_tokens_and_metadata(tmp_path: Path) -> None:
    first = RegisteredChunks(tmp_path)
    made = chunk("Grüße — 你好 🎉", "/a", 7)
    first.add("one", [made])
    first.add("two", chunks("other"))
    second = RegisteredChunks(tmp_path)
    assert second.read("one") == [made] and second.read("one")[0].metadata == made.metadata
    second.remove("one", [made.id, "unknown"])
    assert first.read("one") == [] and first.read("two") == chunks("other")


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = RegisteredChunks(None)
    kept.add("one", chunks("text"))
    assert kept.read("one") == chunks("text") and RegisteredChunks(None).read("one") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("column", ["token_ids = x'01'", "token_ids = 'text'", "metadata = 'no json'"])
def test_a_chunk_that_cannot_be_read_says_how_to_start_over(tmp_path: Path, column: str) -> None:
    kept = RegisteredChunks(tmp_path)
    kept.add("one", chunks("text"))
    change(tmp_path, f"UPDATE chunks SET {column}")
    with pytest.raises(StoreError, match=r"registered\.sqlite is damaged .*delete it"):
        kept.read("one")


def test_a_file_of_another_format_or_program_is_refused(tmp_path: Path) -> None:
    RegisteredChunks(tmp_path).close()
    change(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="format 99"):
        RegisteredChunks(tmp_path)
    change(tmp_path, "PRAGMA user_version = 0")
    with pytest.raises(StoreError, match="not a file of registered chunks"):
        RegisteredChunks(tmp_path)
