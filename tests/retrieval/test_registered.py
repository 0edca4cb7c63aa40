from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from cacheblend_rag.errors import InputError, StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.documents import REGISTERED_FILE
from cacheblend_rag.retrieval.registered import RegisteredChunks
from tests.retrieval.index_workers import chunk, chunks


def everything(kept: RegisteredChunks) -> list[Chunk]:
    return kept.named_after("", 100)


def change(directory: Path, statement: str) -> None:
    with sqlite3.connect(directory / REGISTERED_FILE) as database:
        database.execute(statement)
    database.close()


def test_registered_chunks_are_stored_per_model_with_text_tokens_and_metadata(tmp_path: Path) -> None:
    first, other = RegisteredChunks(tmp_path, "one"), RegisteredChunks(tmp_path, "two")
    made = chunk("Grüße — 你好 🎉", "/a", 7)
    first.add([made])
    other.add(chunks("other"))
    second = RegisteredChunks(tmp_path, "one")
    assert everything(second) == [made] and everything(second)[0].metadata == made.metadata
    second.remove([made.id, "unknown"])
    assert everything(first) == [] and everything(other) == chunks("other")


def test_a_chunk_has_at_most_64_holders(tmp_path: Path) -> None:
    kept, made = RegisteredChunks(tmp_path, "one"), chunks("text", "other")
    for number in range(64):
        kept.add(made[:1], holder=f"client {number}")
    kept.add(made[:1], holder="client 0")
    with pytest.raises(InputError, match=r"64 clients hold the chunk .*&holder=NAME"):
        kept.add(made, holder="client 64")
    assert everything(kept) == made[:1]
    assert kept.release([made[0].id], "client 64") == []
    kept.release([made[0].id], "client 63")
    kept.add(made, holder="client 64")


def test_chunks_registered_without_a_directory_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = RegisteredChunks(None, "one")
    kept.add(chunks("text"))
    assert everything(kept) == chunks("text") and everything(RegisteredChunks(None, "one")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("column", ["token_ids = x'01'", "token_ids = 'text'", "metadata = 'no json'"])
def test_the_error_for_an_unreadable_chunk_explains_how_to_start_over(tmp_path: Path, column: str) -> None:
    kept = RegisteredChunks(tmp_path, "one")
    kept.add(chunks("text"))
    change(tmp_path, f"UPDATE chunks SET {column}")
    with pytest.raises(StoreError, match=r"registered\.sqlite is damaged .*delete it"):
        everything(kept)


@pytest.mark.parametrize("column", ["name", "text", "token_ids", "metadata", "signature", "checksum"])
def test_a_chunk_changed_outside_the_library_is_never_returned(tmp_path: Path, column: str) -> None:
    kept = RegisteredChunks(tmp_path, "one")
    kept.add([chunk("A text with some source.", "/a", 7)])
    new = {"name": "'another'", "text": "'A text with same source.'", "metadata": "'{}'"}.get(column, "x'00000000'")
    change(tmp_path, f"UPDATE chunks SET {column} = {new}")
    with pytest.raises(StoreError, match=r"registered\.sqlite is damaged .*checksum.*delete it"):
        everything(kept)
    with pytest.raises(StoreError, match="checksum"):
        kept.chunk_at(1)


def test_a_flipped_byte_never_changes_a_chunk_unnoticed(tmp_path: Path) -> None:
    made = [chunk(f"Entry number {number} of the harbour log. " * 20, "/a", number) for number in range(6)]
    file = tmp_path / REGISTERED_FILE
    kept = RegisteredChunks(tmp_path, "one")
    kept.add(made)
    kept.close()
    whole = file.read_bytes()
    dice, caught = random.Random(0), 0
    content = [at for at in range(len(whole)) if whole[at]]  # pages are mostly empty
    for at in dice.sample(content, 600):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
        try:
            kept = RegisteredChunks(tmp_path, "one")
        except StoreError:
            caught += 1
            continue
        try:
            assert all(piece in made for piece in everything(kept))
            for row, piece in enumerate(made, 1):
                assert kept.chunk_at(row) in (piece, None)
                assert kept.named(piece.id) in (piece, None)
        except StoreError:
            caught += 1
        kept.close()
    assert caught > 300


def test_a_file_of_another_format_or_program_is_refused(tmp_path: Path) -> None:
    RegisteredChunks(tmp_path, "one").close()
    change(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="format 99"):
        RegisteredChunks(tmp_path, "one")
    change(tmp_path, "PRAGMA user_version = 0")
    with pytest.raises(StoreError, match="not a file of registered chunks"):
        RegisteredChunks(tmp_path, "one")


def test_tenants_share_only_the_file(tmp_path: Path) -> None:
    one, two = RegisteredChunks(tmp_path, "one", "acme"), RegisteredChunks(tmp_path, "one", "globex")
    mine, other = Chunk("policy", "What acme calls its policy.", (1,)), Chunk("policy", "What globex calls it.", (2,))
    one.add([mine])
    assert (two.named("policy"), two.chunk_at(1), two.count()) == (None, None, 0)
    two.add([other])
    two.remove(["policy", "nothing"])
    assert (one.named("policy"), one.chunk_at(1), one.chunk_at(2), two.named("policy")) == (mine, mine, None, None)
    change(tmp_path, "UPDATE chunks SET namespace = 'globex'")
    with pytest.raises(StoreError, match="checksum"):
        two.named("policy")


def test_a_chunk_registered_in_place_of_the_newest_is_found_by_other_registries(tmp_path: Path) -> None:
    one, two = RegisteredChunks(tmp_path, "one"), RegisteredChunks(tmp_path, "one")
    registry = ChunkRegistry()
    one.add(chunks("The text that is registered first."))
    registry.attach(two)
    one.remove([c.id for c in everything(one)])
    one.add(chunks("The text that took its place."))
    registry.follow()
    assert registry.find("The text that took its place.") == chunks("The text that took its place.")


def test_a_chunk_is_released_by_its_last_holder(tmp_path: Path) -> None:
    first, second, unheld = made = [chunk(f"Chunk {number}, which somebody holds.") for number in range(3)]
    kept = RegisteredChunks(tmp_path, "one")
    kept.add(made[:2], holder="a")
    kept.add(made[:1], holder="b")
    ids = [piece.id for piece in made]
    assert kept.release(ids, "a") == [second.id, unheld.id]
    assert kept.release([first.id], "nobody") == []
    assert kept.release([first.id], "b") == [first.id]
    kept.add([first], holder="a")
    kept.remove([first.id])
    kept.add([first], holder="b")
    assert kept.release([first.id], "b") == [first.id]  # a removal ends all earlier holds
