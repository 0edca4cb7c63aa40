from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.registry import MATCH_WINDOW, ChunkRegistry


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


# Few letters and a common opening, so that chunks overlap, nest and share their index entry.
BODIES = st.text(alphabet="ab", max_size=8).map(lambda tail: "aaaaaaaaaaaaaaaa" + tail)
CHUNKS = st.lists(st.one_of(BODIES, st.text(alphabet="ab", min_size=14, max_size=20), st.text(min_size=1)), max_size=12)


@settings(max_examples=300, deadline=None)
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
    assert list(registry) == kept and len(registry) == len(kept)
    assert all(registry.get(c.id) is c for c in kept) and not any(c.id in registry for c in gone)


def test_the_longest_of_several_chunks_at_a_place_wins_and_the_leftmost_place_wins() -> None:
    short, long, late = (
        chunk(t) for t in ("The harbour is old.", "The harbour is old. Very.", "is old. Very. Indeed.")
    )
    registry = ChunkRegistry([short, long, late])
    assert registry.find("See: The harbour is old. Very. Indeed.") == ["See: ", long, " Indeed."]
    registry.remove([long.id])
    assert registry.find("The harbour is old. Very. Indeed.") == [short, " Very. Indeed."]


def test_short_chunks_are_known_by_id_but_never_found_in_text() -> None:
    registry = ChunkRegistry([chunk("Yes, it is.")])
    assert registry.get(chunk_id("Yes, it is.")) is not None
    assert registry.find("Yes, it is. Or not.") == ["Yes, it is. Or not."]


def test_adding_twice_and_removing_once_leaves_nothing() -> None:
    one = chunk("A chunk of some length.")
    registry = ChunkRegistry([one, one])
    registry.remove([one.id, "unknown"])
    assert registry.find(one.text) == [one.text] and len(registry) == 0


def test_ten_thousand_chunks_are_each_found() -> None:
    chunks = [chunk(f"Entry {n} of the harbour log, in full.") for n in range(10_000)]
    registry = ChunkRegistry(chunks)
    assert registry.find("\n\n".join(c.text for c in chunks[::7]))[::2] == chunks[::7]


def test_readers_see_whole_chunks_while_others_write() -> None:
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
