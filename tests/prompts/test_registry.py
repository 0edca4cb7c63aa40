from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.matching import Indices, Signatures, signatures_of
from cacheblend_rag.prompts.registry import MATCH_WINDOW, AddedChunks, ChunkRegistry


def chunk(text: str) -> Chunk:
    return Chunk(chunk_id(text), text, tuple(range(len(text))))


def naive_find(text: str, chunks: list[Chunk]) -> list[str | Chunk]:
    found: list[str | Chunk] = []
    begin = at = 0
    by_length = sorted((c for c in chunks if len(c.text) >= MATCH_WINDOW), key=lambda c: -len(c.text))
    while at < len(text):
        hit = next((c for c in by_length if text.startswith(c.text, at)), None)
        if hit is None:
            at += 1
            continue
        found += [text[begin:at]] if at > begin else []
        found.append(hit)
        begin = at = at + len(hit.text)
    return found + ([text[begin:]] if begin < len(text) else [])


# Few letters and a common opening make chunks overlap, nest and share their index entry.
BODIES = st.text(alphabet="ab", max_size=8).map(lambda tail: "aaaaaaaaaaaaaaaa" + tail)
CHUNKS = st.lists(st.one_of(BODIES, st.text(alphabet="ab", min_size=14, max_size=20), st.text(min_size=1)), max_size=12)


@pytest.mark.slow
@settings(max_examples=300)
@given(texts=CHUNKS, removed=st.sets(st.integers(0, 11)), data=st.data())
def test_find_equals_a_naive_search(texts: list[str], removed: set[int], data: st.DataObject) -> None:
    chunks = list({c.id: c for c in map(chunk, texts)}.values())
    registry = ChunkRegistry(chunks)
    gone = [c for i, c in enumerate(chunks) if i in removed]
    registry.remove(c.id for c in gone)
    kept = [c for c in chunks if c not in gone]
    pieces = st.one_of(
        st.text(alphabet="ab", max_size=6), st.text(max_size=4), st.sampled_from([c.text for c in chunks] or [""])
    )
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    found = registry.find(text)
    assert found == naive_find(text, kept)
    assert "".join(p if isinstance(p, str) else p.text for p in found) == text
    assert list(registry) == sorted(kept, key=lambda c: c.id) and len(registry) == len(kept)
    assert all(registry.get(c.id) is c for c in kept) and not any(c.id in registry for c in gone)


def test_the_leftmost_place_wins_and_at_one_place_the_longest_chunk() -> None:
    short, long, late = (
        chunk(t) for t in ("The harbour is old.", "The harbour is old. Very.", "is old. Very. Indeed.")
    )
    registry = ChunkRegistry([short, long, late])
    assert registry.find("See: The harbour is old. Very. Indeed.") == ["See: ", long, " Indeed."]
    registry.remove([long.id])
    assert registry.find("The harbour is old. Very. Indeed.") == [short, " Very. Indeed."]


def test_short_chunks_are_found_by_id_but_never_in_text() -> None:
    registry = ChunkRegistry([chunk("Yes, it is.")])
    assert registry.get(chunk_id("Yes, it is.")) is not None
    assert registry.find("Yes, it is. Or not.") == ["Yes, it is. Or not."]


def test_adding_a_chunk_twice_and_removing_it_once_leaves_nothing() -> None:
    one = chunk("A chunk of some length.")
    registry = ChunkRegistry([one, one])
    registry.remove([one.id, "unknown"])
    assert registry.find(one.text) == [one.text] and len(registry) == 0


def test_ten_thousand_chunks_are_each_found() -> None:
    chunks = [chunk(f"Entry {n} of the harbour log, in full.") for n in range(10_000)]
    registry = ChunkRegistry(chunks)
    assert registry.find("\n\n".join(c.text for c in chunks[::7]))[::2] == chunks[::7]


class Shelf:
    """An in-memory source of chunks that counts its reads."""

    def __init__(self, texts: list[str]) -> None:
        self.rows = dict(enumerate(map(chunk, texts), 1))
        self.last = len(texts)
        self.read: list[int] = []
        self.broken = False

    @property
    def generation(self) -> int:
        return self.last

    def append(self, text: str) -> Chunk:
        self.last += 1
        self.rows[self.last] = chunk(text)
        return self.rows[self.last]

    def signatures_after(self, after: int) -> tuple[Indices, Signatures]:
        new = [row for row in sorted(self.rows) if row > after]
        return np.array(new, np.int64), signatures_of([self.rows[row].text for row in new])

    def chunk_at(self, row: int) -> Chunk | None:
        self.read.append(row)
        if self.broken:
            raise StoreError("the disk is gone")
        return self.rows.get(row)

    def known(self, chunk_ids: Sequence[str]) -> set[str]:
        return {c.id for c in self.rows.values()} & set(chunk_ids)

    def named(self, chunk_id: str) -> Chunk | None:
        return next((c for c in self.rows.values() if c.id == chunk_id), None)

    def named_after(self, chunk_id: str, most: int) -> list[Chunk]:
        return sorted((c for c in self.rows.values() if c.id > chunk_id), key=lambda c: c.id)[:most]

    def count(self) -> int:
        return len(self.rows)


def test_chunks_of_a_source_are_found_and_only_those_in_the_prompt_are_read() -> None:
    shelf = Shelf([f"Entry {n} of the harbour log, in full." for n in range(50)])
    registry = ChunkRegistry([chunk("A chunk that was added by hand.")])
    registry.attach(shelf)
    prompt = f"First: {shelf.rows[8].text} Then: A chunk that was added by hand."
    assert registry.find(prompt) == ["First: ", shelf.rows[8], " Then: ", chunk("A chunk that was added by hand.")]
    assert shelf.read == [8]
    assert len(registry) == 51 and sorted(c.id for c in registry) == [c.id for c in registry]
    assert registry.get(shelf.rows[3].id) is shelf.rows[3] and shelf.rows[3].id in registry


def test_a_source_is_followed_without_reading_its_former_chunks_again() -> None:
    shelf = Shelf(["The first entry of the harbour log."])
    registry = ChunkRegistry()
    registry.attach(shelf)
    new = shelf.append("The second entry of the harbour log.")
    assert registry.find(new.text) == [new.text]
    registry.follow()
    assert registry.find(new.text) == [new]
    gone = shelf.rows.pop(1)
    assert registry.find(gone.text) == [gone.text] and registry.get(gone.id) is None


def test_an_added_chunk_becomes_the_sources_and_stays_after_its_removal_from_the_registry() -> None:
    shelf = Shelf([])
    one = chunk("A chunk that is about to be indexed.")
    registry = ChunkRegistry([one])
    registry.attach(shelf)
    shelf.append(one.text)
    registry.follow()
    assert len(registry) == 1
    registry.remove([one.id])
    registry.add([one])
    assert len(registry) == 1 and registry.find(one.text) == [one]
    registry.detach(shelf)
    assert registry.find(one.text) == [one.text] and len(registry) == 0


def test_texts_with_a_wrong_hash_are_read_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cacheblend_rag.prompts.registry._MAX_WRONG", 50)
    shelf = Shelf(["a" * 40])
    registry = ChunkRegistry()
    registry.attach(shelf)
    shelf.rows[1] = chunk("b" * 40)  # simulates a forged hash
    assert registry.find("a" * 10_000) == ["a" * 10_000]
    assert len(shelf.read) == 50
    assert registry.covering("a" * 10_000, [(0, 10_000)])[-1][1] == 10_000  # further matches of the hash are trusted
    assert len(shelf.read) < 100


def test_chunks_of_an_unreadable_source_become_text(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf(["The first entry of the harbour log."])
    registry = ChunkRegistry()
    registry.attach(shelf)
    shelf.broken = True
    assert registry.find(f"See: {shelf.rows[1].text}") == [f"See: {shelf.rows[1].text}"]
    assert "the disk is gone" in caplog.text


def test_repeated_additions_and_removals_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.prompts.registry._SMALL", 8)
    registry = ChunkRegistry()
    for number in range(500):
        one = chunk(f"Entry {number} of the harbour log, in full.")
        registry.add([one])
        assert registry.find(one.text) == [one]
        registry.remove([one.id])
    assert registry._attached[0].table.size < 100


def test_readers_see_whole_chunks_during_writes() -> None:
    chunks = [chunk(f"Page {n:05d} of the handbook, in full.") for n in range(400)]
    registry = ChunkRegistry(chunks[:1])
    text = " ".join(c.text for c in chunks)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            registry.add(chunks[1:])
            registry.remove(c.id for c in chunks[1:])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(50):
            found = registry.find(text)
            assert found[0] is chunks[0]
            assert "".join(p if isinstance(p, str) else p.text for p in found) == text
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_the_first_attached_source_wins_and_lent_sources_are_not_listed() -> None:
    def source(text: str) -> AddedChunks:
        made = AddedChunks()
        made.put([Chunk("same", text * 9, (1,))])
        return made

    registry, first, second = ChunkRegistry(), source("The first. "), source("The second. ")
    registry.attach(first)
    registry.attach(second)
    assert [chunk.text for chunk in registry] == [registry.get("same").text] == ["The first. " * 9]
    registry.detach(first)
    registry.attach(first, lent=True)
    assert [chunk.text for chunk in registry] == ["The second. " * 9]
    registry.detach(first)
    registry.attach(first)
    assert len(registry) == 2, "who is attached again need not be lent again"


def test_an_unreadable_source_is_not_attached_and_does_not_block_detaching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: int) -> NoReturn:
        raise StoreError("the disk is gone")

    one, two, three = (Shelf([f"The {name} shelf of the harbour's library."]) for name in ("first", "second", "third"))
    texts = [shelf.rows[1].text for shelf in (one, two, three)]
    registry = ChunkRegistry()
    registry.attach(one)
    registry.attach(two)
    monkeypatch.setattr(three, "signatures_after", fail)
    with pytest.raises(StoreError, match="disk is gone"):
        registry.attach(three)
    assert len(registry) == 2 and registry.find("".join(texts)) == [one.rows[1], two.rows[1], texts[2]]
    monkeypatch.setattr(two, "signatures_after", fail)
    added = two.append("Another entry of the second shelf.")
    with pytest.raises(StoreError, match="disk is gone"):
        registry.follow()
    registry.detach(one)
    monkeypatch.undo()
    registry.follow()
    assert registry.find(texts[0] + added.text) == [texts[0], added]


def test_others_have_ignores_the_chunk_itself() -> None:
    text = "The harbour master counts the boats at noon, and again at dusk. " * 3
    registry, one = ChunkRegistry(), Chunk("one", text, (1,))
    registry.add([one])
    assert not registry.others_have(one)
    registry.add([Chunk("two", text, (1,))])
    assert registry.others_have(one)
