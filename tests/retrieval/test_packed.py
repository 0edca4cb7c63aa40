"""A large index, whose vectors are packed in a file; here it is large from 2,000 vectors on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval import search as search_module
from cacheblend_rag.retrieval.database import FILE_NAME
from cacheblend_rag.retrieval.embedding import Embedder, Vectors
from cacheblend_rag.retrieval.index import ChunkIndex
from tests.retrieval.index_workers import CONFIG, WordEmbedder, chunk
from tests.store.samples import memory_directory

DIMENSION, DOCUMENTS, CHUNKS = 24, 40, 50


class PlacedEmbedder(WordEmbedder):
    """Two windows for each text, near one of sixty topics; what a text says decides where."""

    def texts(self, texts: Sequence[str]) -> list[Vectors]:
        return [np.stack([self.question(text), self.question(text + " (second half)")]) for text in texts]

    def question(self, text: str) -> Vectors:
        draw = np.random.default_rng(sum(ord(letter) * 31**place for place, letter in enumerate(text[:24])))
        topic = np.random.default_rng(int(draw.integers(60))).normal(size=self.length)
        vector = topic + 0.8 * draw.normal(size=self.length)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)

    @property
    def length(self) -> int:
        return DIMENSION if self.name == "words" else 2 * DIMENSION


def document(number: int, count: int = CHUNKS) -> list[Chunk]:
    return [chunk(f"{number * 1000 + place} is this text") for place in range(count)]


@pytest.fixture(autouse=True)
def small_numbers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "PACKED_FROM", 2000)
    monkeypatch.setattr(Embedder, "load", lambda name="words", device=None: PlacedEmbedder(name))


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def index(directory: Path) -> Iterator[ChunkIndex]:
    with ChunkIndex.open(directory, CONFIG) as index:
        for number in range(DOCUMENTS):
            index.add(f"/{number}", "d", document(number))
        yield index


def nearest(index: ChunkIndex, question: str, k: int) -> list[tuple[str, float]]:
    """What a comparison with every vector finds, in plain NumPy."""
    vector = index.load_embedder().question(question)
    stored = index.vectors_of(c.id for c in index.chunks())
    scores = {name: float((windows @ vector).max()) for name, windows in stored.items()}
    return sorted(scores.items(), key=lambda item: -item[1])[:k]


def found(index: ChunkIndex, question: str, k: int) -> list[tuple[str, float]]:
    return [(hit.chunk.id, hit.score or 0.0) for hit in index.search(question, k)]


def recall(index: ChunkIndex, k: int = 10, questions: int = 50) -> float:
    shares = []
    for number in range(questions):
        want, got = dict(nearest(index, f"question {number}", k)), dict(found(index, f"question {number}", k))
        assert len(got) == k
        assert all(abs(score - want[name]) < 1e-5 for name, score in got.items() if name in want)
        shares.append(len(want.keys() & got.keys()) / k)
    return float(np.mean(shares))


def packed_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith(f"{FILE_NAME}-vectors-")]


@pytest.mark.slow
def test_packed_vectors_find_what_a_comparison_with_all_finds(index: ChunkIndex) -> None:
    assert recall(index, questions=20) == 1.0
    assert index.pack() == 2 * DOCUMENTS * CHUNKS
    assert recall(index) > 0.97
    assert found(index, "the first question", 2000)[-1][1] == pytest.approx(
        nearest(index, "the first question", 2000)[-1][1]
    )


def test_packing_reads_no_more_lists_than_it_needs(index: ChunkIndex) -> None:
    index.pack()
    index.search("question", 1)
    packed = index._search._packed
    assert packed.nlist == round((2 * DOCUMENTS * CHUNKS) ** 0.5) and packed.nprobe < packed.nlist / 2
    assert (
        packed.ntotal == 2 * DOCUMENTS * CHUNKS and index._search._recent is None
    )  # all are in the file, none in memory


@pytest.mark.slow
def test_what_comes_and_goes_after_packing_is_followed(index: ChunkIndex, directory: Path) -> None:
    with ChunkIndex.open(directory, CONFIG) as other:
        assert other.search("7003 is this text", 1)  # with all vectors in memory
        index.pack()
        index.add("/new", "d", document(77, 5))
        index.delete("/7")
        for opened in (index, other):
            assert found(opened, "77003 is this text", 1)[0][1] == pytest.approx(1.0)
            assert all(hit.path != "/7" for hit in opened.search("7003 is this text", 100))
            assert recall(opened, questions=20) > 0.95
        assert index.pack() == 0  # little is new
        for number in range(100, 120):
            index.add(f"/{number}", "d", document(number))
        assert index.pack() == 2 * (DOCUMENTS + 20 - 1) * CHUNKS + 10
        assert recall(other, questions=20) > 0.95
        assert len(packed_files(directory)) == 2  # the last, and the one that others may be opening
        index.delete("/0")
    with ChunkIndex.open(directory) as later:
        assert recall(later, questions=20) > 0.95


def test_most_of_an_index_may_be_deleted(index: ChunkIndex) -> None:
    index.pack()
    for number in range(2, DOCUMENTS):
        index.delete(f"/{number}")
    assert dict(found(index, "some question", 60)) == pytest.approx(dict(nearest(index, "some question", 60)))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_file_costs_memory_but_no_answer(
    index: ChunkIndex, directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    index.pack()
    (file,) = packed_files(directory)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    if damage != "delete":
        file.write_bytes(data if damage == "flip" else data[:-100])
    with ChunkIndex.open(directory) as opened, caplog.at_level(logging.WARNING):
        assert recall(opened, questions=10) == 1.0
        assert len(caplog.messages) == 1 and "Index again to pack them" in caplog.messages[0]
        assert opened.pack() == 2 * DOCUMENTS * CHUNKS
        assert recall(opened, questions=10) > 0.97
    assert file not in packed_files(directory)


@pytest.mark.slow
def test_another_embedding_model_starts_anew(index: ChunkIndex) -> None:
    index.pack()
    index.rebuild("other words")
    assert recall(index, questions=10) == 1.0
    assert index.pack() == 2 * DOCUMENTS * CHUNKS
    assert recall(index, questions=10) > 0.97


def test_vectors_replaced_while_they_are_packed_are_not_taken_for_packed(
    index: ChunkIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = search_module.pack

    def slowly(*given: object) -> object:
        result = pack(*given)  # type: ignore[arg-type]
        index.rebuild("other words")
        return result

    monkeypatch.setattr(search_module, "pack", slowly)
    index.pack()
    assert recall(index, questions=10) == 1.0


def test_a_file_that_cannot_be_written_is_told_and_searches_go_on(
    index: ChunkIndex, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import faiss

    def full(index: object, path: str) -> None:
        Path(path).write_bytes(b"begun")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    assert index.pack() == 0
    assert "No space left" in caplog.text and not packed_files(directory)
    assert recall(index, questions=10) == 1.0


def test_a_small_index_is_not_packed(directory: Path) -> None:
    with ChunkIndex.open(directory, CONFIG) as index:
        index.add("/a", "d", document(1))
        assert index.pack() == 0
    assert not packed_files(directory)
