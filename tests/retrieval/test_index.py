from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.errors import InputError, ModelError, StoreError, StoreMismatchError, UnknownChunkError
from cacheblend_rag.retrieval.chunking import split_text
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.documents import INDEX_FILE
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.kv import ModelFingerprint
from tests.retrieval import index_workers
from tests.retrieval.index_workers import CONFIG, chunk, chunks
from tests.store.samples import memory_directory
from tests.store.workers import start

pytestmark = pytest.mark.slow


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Embedder, "load", index_workers.load)


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def index(words: None, directory: Path) -> Iterator[ChunkIndex]:
    with ChunkIndex(directory, CONFIG) as opened:
        yield opened


def texts(index: ChunkIndex, question: str, k: int) -> list[str]:
    return [hit.chunk.text for hit in index.search(question, k)]


@pytest.fixture(scope="module")
def real_embedder() -> Embedder:
    return Embedder.load(DEFAULT_EMBEDDING)


def test_the_packaged_embedding_finds_the_chunk_that_a_question_is_about(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, real_embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedder, "load", lambda name: real_embedder)
    documents = {
        "/sea.md": "The brig lost her anchor in a northern storm.\n\nThe crew ate dried cod for eleven weeks.",
        "/town.md": "Bread is baked before dawn and sold by noon.\n\nThe mayor of the town is Oda Fenwick.",
    }
    with ChunkIndex(tmp_path, replace(CONFIG, embedding=None)) as index:
        assert index.config.embedding == DEFAULT_EMBEDDING
        for path, text in documents.items():
            index.add(path, "d", split_text(text, tokenizer, 40, metadata={"source": path}))
        best = index.search("Who governs the place?", 4)
        assert best[0].path == "/town.md" and "Oda Fenwick" in best[0].chunk.text
        scores = [hit.score for hit in best if hit.score is not None]
        assert len(scores) == len(best) and scores == sorted(scores, reverse=True) and scores[0] <= 1.0001
        assert "cod" in index.search("What did the sailors have for dinner?", 1)[0].chunk.text


def test_text_beyond_the_embedding_models_window_is_found(real_embedder: Embedder) -> None:
    filler = "The harbour office opens at nine and closes at five on every working day of the year. " * 35
    text = filler + "Queen Isolde was buried under the old walnut tree."
    windows = real_embedder.texts([text, "short"])
    assert [len(group) for group in windows] == [3, 1]
    question = real_embedder.question("Where is the grave of Queen Isolde?")
    scores = windows[0] @ question
    assert scores.argmax() == 2 and scores[2] > scores[0] + 0.2


def test_windows_cover_the_text_and_fit_the_model(real_embedder: Embedder) -> None:
    text = "A naïve café—unbelievably antidisestablishmentarian. " * 60
    windows = real_embedder.windows(text)
    assert "".join(windows) == text
    tokenizer = real_embedder.model.tokenizer
    # A word cut in two may take one more word piece than the whole word.
    assert max(len(tokenizer(w, verbose=False)["input_ids"]) for w in windows) <= 256 + 2


def test_an_unknown_embedding_model_is_a_model_error(directory: Path) -> None:
    with ChunkIndex(directory, replace(CONFIG, embedding="/nowhere/model")) as index:
        with pytest.raises(ModelError, match="/nowhere/model"):
            index.add("/a", "d", chunks("text"))
        assert index.documents() == []


@pytest.mark.slow
def test_chunks_can_be_read_without_loading_an_embedding_or_faiss(index: ChunkIndex, directory: Path) -> None:
    index.add("/a", "d", chunks("one", "two"))
    program = (
        "import sys\n"
        "from cacheblend_rag.retrieval.index import ChunkIndex\n"
        f"index = ChunkIndex({str(directory)!r})\n"
        "assert [c.text for c in index.chunks()] == ['one', 'two'] and index.stats().chunks == 2\n"
        "assert not {'faiss', 'sentence_transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_stored_chunk_has_its_text_tokens_and_metadata(index: ChunkIndex, directory: Path) -> None:
    made = chunk("Grüße — 你好 🎉", "/a", 7)
    index.add("/a", "d", [made])
    with ChunkIndex(directory) as again:
        for read in (again.chunk(made.id), *again.chunks(), again.search("x", 1)[0].chunk):
            assert read == made and read.metadata == made.metadata
    with pytest.raises(UnknownChunkError, match="feed"):
        index.chunk("feed")


def test_a_chunk_in_two_documents_is_one_hit_and_outlives_one_of_the_documents(index: ChunkIndex) -> None:
    shared, own = chunk("shared words"), chunk("own words")
    assert index.add("/a", "d", [own, shared]) == index.add("/b", "d", [shared]) == []
    assert [(hit.path, hit.ordinal) for hit in index.search("shared words", 5)] == [("/a", 1), ("/a", 0)]
    assert index.delete("/a") == [own]
    assert [(hit.path, hit.ordinal) for hit in index.search("shared words", 5)] == [("/b", 0)]
    assert index.delete("/b") == [shared]
    assert index.search("shared words", 5) == list(index.chunks()) == index.documents() == []


def test_adding_a_document_again_replaces_it(index: ChunkIndex) -> None:
    old = chunks("first", "second", "first")
    index.add("/a", "1", old)
    assert index.add("/a", "2", chunks("second", "third")) == [old[0]]
    assert index.digest_of("/a") == "2" and index.digest_of("/b") is None
    assert [(d.path, d.digest, d.chunks) for d in index.documents()] == [("/a", "2", 2)]
    assert texts(index, "third", 9)[0] == "third" and len(texts(index, "third", 9)) == 2


def test_a_chunk_is_scored_by_its_best_window_and_found_once(index: ChunkIndex) -> None:
    many = "|".join(["blue anchor"] * 40) + "|storm"
    index.add("/a", "d", chunks(many, "anchor", "unrelated words"))
    assert texts(index, "blue anchor", 2) == [many, "anchor"]
    assert texts(index, "storm", 1) == [many]


def test_vectors_can_be_read_and_searched_without_a_question(index: ChunkIndex) -> None:
    held = chunks("one anchor", "two bells|three bells", "four sails")
    index.add("/a", "d", held)
    embedder = index.load_embedder()
    found = index.vectors.of([held[1].id, "missing", held[0].id, held[1].id])
    assert found.keys() == {held[0].id, held[1].id}
    for each in held[:2]:
        assert np.array_equal(found[each.id], embedder.texts([each.text])[0])
    want = [(hit.chunk.id, hit.score) for hit in index.search("three bells", 2)]
    assert index.nearest(embedder.question("three bells"), 2) == want
    assert want[0][0] == held[1].id


def test_neighbours_are_the_chunks_before_and_after_a_hit(index: ChunkIndex) -> None:
    index.add("/a", "d", chunks("zero", "one", "two", "three"))
    index.add("/b", "d", chunks("other"))
    hit = index.search("one", 1)[0]
    assert [(n.chunk.text, n.ordinal, n.score) for n in index.neighbours(hit)] == [("two", 2, None)]
    assert [n.chunk.text for n in index.neighbours(hit, before=5, after=5)] == ["zero", "two", "three"]
    assert index.neighbours(hit, 0, 0) == []


def test_wrong_arguments_are_input_errors(index: ChunkIndex) -> None:
    with pytest.raises(InputError, match="k is 0"):
        index.search("x", 0)
    with pytest.raises(InputError, match=r"/gone is not in the index"):
        index.delete("/gone")


def test_an_error_during_an_addition_changes_nothing(index: ChunkIndex) -> None:
    index.add("/a", "1", chunks("one"))
    bad = replace(chunk("two"), token_ids=("no number",))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        index.add("/a", "2", [chunk("three"), bad])
    assert index.digest_of("/a") == "1" and texts(index, "three", 9) == ["one"]


def test_rebuilding_changes_the_embedding_of_every_chunk(index: ChunkIndex, directory: Path) -> None:
    index.add("/a", "d", chunks("one", "two"))
    with ChunkIndex(directory) as other:
        assert texts(other, "two", 1) == ["two"]
        done: list[int] = []
        index.rebuild("more words", done.append)
        assert sum(done) == 2
        for each in (index, other):
            assert each.config.embedding == "more words" and texts(each, "two", 1) == ["two"]


def test_chunks_added_during_a_rebuild_by_another_process_get_the_new_embedding(
    index: ChunkIndex, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkIndex(directory) as other:
        real = index_workers.WordEmbedder.texts

        def interrupted(self: index_workers.WordEmbedder, batch: list[str]) -> object:
            monkeypatch.setattr(index_workers.WordEmbedder, "texts", real)
            other.rebuild("more words")
            return real(self, batch)

        monkeypatch.setattr(index_workers.WordEmbedder, "texts", interrupted)
        index.add("/a", "d", chunks("one", "two"))
        assert texts(index, "two", 2) == texts(other, "two", 2) == ["two", "one"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            replace(CONFIG, model=ModelFingerprint("cd" * 16, "big-model")),
            r"small-model.*big-model.*--model small-model",
        ),
        (replace(CONFIG, chunk_tokens=512), r"chunks of 64 tokens \(overlap 0\), not 512 \(overlap 0\)"),
        (replace(CONFIG, overlap=8), r"not 64 \(overlap 8\)"),
        (replace(CONFIG, header_ids=(1,)), r"another prompt header \(3 tokens, now 1\)"),
        (replace(CONFIG, embedding="others"), r"embedding model is words, not others"),
    ],
)
def test_an_index_made_for_another_configuration_is_refused(
    index: ChunkIndex, directory: Path, wanted: index_workers.IndexConfig, message: str
) -> None:
    with pytest.raises(StoreMismatchError, match=f"{message}.*another directory"):
        ChunkIndex(directory, wanted)
    renamed = replace(CONFIG, model=ModelFingerprint(CONFIG.model.digest, "moved"), embedding=None)
    ChunkIndex(directory, renamed).close()


def test_a_missing_or_foreign_index_is_refused(directory: Path) -> None:
    assert not ChunkIndex.exists(directory)
    with pytest.raises(StoreError, match="There is no index"):
        ChunkIndex(directory)
    assert list(directory.iterdir()) == []
    (directory / INDEX_FILE).touch()  # an interrupted creation leaves an empty file
    with pytest.raises(StoreError, match="There is no index"):
        ChunkIndex(directory)
    ChunkIndex(directory, CONFIG).close()
    with sqlite3.connect(directory / INDEX_FILE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreMismatchError, match="format 99"):
        ChunkIndex(directory)
    (directory / "file").touch()
    with pytest.raises(StoreError):
        ChunkIndex(directory / "file" / "below", CONFIG)


def test_a_foreign_database_is_refused_and_left_unchanged(directory: Path) -> None:
    with sqlite3.connect(directory / INDEX_FILE) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(StoreError, match="not an index of this library"):
        ChunkIndex(directory, CONFIG)


def test_a_damaged_index_raises_an_error_and_never_returns_a_wrong_chunk(index: ChunkIndex, directory: Path) -> None:
    stored = [f"text number {number} about {['a', 'b', 'c', 'd', 'e', 'f'][number % 6]}" for number in range(60)]
    index.add("/a", "d", chunks(*stored))
    expected = {c.id: c for c in index.chunks()}
    index.close()
    good = (directory / INDEX_FILE).read_bytes()
    told = 0
    for at in range(0, len(good), 601):
        broken = bytearray(good)
        broken[at] ^= 0x55
        for leftover in directory.glob(f"{INDEX_FILE}*"):
            leftover.unlink()
        (directory / INDEX_FILE).write_bytes(broken)
        try:
            with ChunkIndex(directory) as opened:
                assert all(expected.get(c.id) == c for c in opened.chunks())
                assert all(expected.get(h.chunk.id) == h.chunk for h in opened.search("text about c", 60))
        except StoreError as error:
            told += 1
            assert any(word in str(error) for word in ("damaged", "format", "not an index", "no index")), error
    assert told > 5


@pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0" + b"\xff" * 5000])
def test_the_error_for_a_broken_database_file_explains_how_to_start_over(directory: Path, content: bytes) -> None:
    (directory / INDEX_FILE).write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged.*Delete index\.sqlite3\*.*index the documents again"):
        ChunkIndex(directory, CONFIG)


def test_damaged_vectors_are_repaired_by_rebuilding(index: ChunkIndex) -> None:
    index.add("/a", "d", chunks("one", "two"))
    index.db.execute("UPDATE vectors SET vector = zeroblob(length(vector)) WHERE id = 1")
    with pytest.raises(StoreError, match="rebuilding the index repairs"):
        index.search("one", 1)
    index.rebuild()
    assert texts(index, "one", 1) == ["one"]


def test_a_writer_killed_before_any_statement_leaves_the_index_whole(words: None, directory: Path) -> None:
    versions = {"old": ["kept in both", "old one"], "new": ["kept in both", "new one", "new two"]}
    seen = set()
    for statement in range(1, 200):
        with ChunkIndex(directory, CONFIG) as index:
            index.add("/a", "old", chunks("old one", "kept in both"))
        process, connection = start(index_workers.replace_and_die, directory, statement)
        try:
            finished = connection.recv() == "done"
        except EOFError:
            finished = False
        process.join()
        with ChunkIndex(directory, CONFIG) as index:
            digest = index.digest_of("/a")
            assert digest is not None
            assert sorted(texts(index, "one", 9)) == sorted(c.text for c in index.chunks()) == versions[digest]
            seen.add(digest)
        if finished:
            break
    assert finished and statement > 20 and seen == {"old", "new"}


@pytest.mark.parametrize("statement", [1, 2])  # these statements run before the lock for making the tables is taken
def test_an_index_created_by_another_process_at_the_same_moment_opens(
    words: None, directory: Path, statement: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = IndexDatabase.connect
    seen: list[str] = []
    made: list[bool] = []

    def watched(database: IndexDatabase, mode: str) -> sqlite3.Connection:
        monkeypatch.setattr(IndexDatabase, "connect", connect)
        db = connect(database, mode)

        def before(text: str) -> None:
            seen.append(text)
            if len(seen) == statement:
                ChunkIndex(directory, CONFIG).close()
                made.append(True)

        db.set_trace_callback(before)
        return db

    directory.joinpath(INDEX_FILE).touch()
    monkeypatch.setattr(IndexDatabase, "connect", watched)
    with ChunkIndex(directory, CONFIG) as index:
        assert index.stats().documents == 0 and made


def test_an_index_exists_only_once_it_can_be_opened(
    words: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = IndexDatabase.connect
    there: list[bool] = []

    def look(_: str) -> None:
        there.append(ChunkIndex.exists(directory))
        if there[-1]:
            ChunkIndex(directory).close()

    def watched(database: IndexDatabase, mode: str) -> sqlite3.Connection:
        monkeypatch.setattr(IndexDatabase, "connect", connect)
        db = connect(database, mode)
        db.set_trace_callback(look)
        return db

    monkeypatch.setattr(IndexDatabase, "connect", watched)
    ChunkIndex(directory, CONFIG).close()
    assert there == sorted(there) and {*there} == {False, True}


def test_processes_add_at_the_same_time_and_find_each_others_chunks(words: None, directory: Path) -> None:
    workers = [start(index_workers.add_many, directory, prefix, 15) for prefix in "xyz"]
    for _, connection in workers:
        connection.recv()  # all workers are running, and the index exists
    with ChunkIndex(directory, CONFIG) as index:
        before = index.generation
        while index.stats().documents < 45:
            paths = {document.path for document in index.documents()}
            assert paths <= {hit.path for hit in index.search("own text", 100)}
        for process, _ in workers:
            process.join()
            assert process.exitcode == 0
        assert index.generation != before
        assert len(index.search("shared by all", 100)) == index.stats().chunks == 46
        assert texts(index, "own text y 7", 1) == ["own text y 7"]


def test_threads_share_an_index_object(index: ChunkIndex) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in range(10):
                index.add(f"/{name}{number}", "d", chunks(f"{name} {number}", "shared"))
                assert index.search(f"{name} {number}", 3)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and index.stats().documents == 40 and index.stats().chunks == 41


@pytest.mark.parametrize("writer_is_open", [False, True])
def test_a_read_only_index_can_be_searched(words: None, directory: Path, writer_is_open: bool) -> None:
    writer = ChunkIndex(directory, CONFIG)
    writer.add("/a", "d", chunks("blue anchor", "red lantern"))
    if not writer_is_open:
        writer.close()
    for file in directory.iterdir():
        file.chmod(0o444)
    directory.chmod(0o555)
    process, connection = start(index_workers.read_only, directory)
    found, refusal = connection.recv()
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
    assert found == ["blue anchor"]
    assert "no write permission" in refusal
    if not writer_is_open:
        writer = ChunkIndex(directory, CONFIG)
    writer.add("/b", "d", chunks("green bottle"))
    writer.close()
    connection.send("look again")
    assert connection.recv() == ["green bottle"]
    process.join()
    assert process.exitcode == 0


_texts = st.sampled_from(["alpha", "beta", "gamma", "delta", "alpha beta", "gamma | delta"])
_steps = st.lists(
    st.tuples(st.sampled_from(["/1", "/2", "/3"]), st.one_of(st.none(), st.lists(_texts, max_size=4))), max_size=8
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_an_index_contains_exactly_the_chunks_of_its_documents(
    words: None, steps: list[tuple[str, list[str] | None]]
) -> None:
    model: dict[str, list[str]] = {}
    with (
        memory_directory() as root,
        ChunkIndex(root, CONFIG) as index,
        ChunkIndex(root) as reader,
    ):
        for number, (path, content) in enumerate(steps):
            before = {text for held in model.values() for text in held}
            if content is not None:
                removed = index.add(path, str(number), chunks(*content))
                model[path] = content
            elif path in model:
                removed = index.delete(path)
                del model[path]
            else:
                continue
            live = {text for held in model.values() for text in held}
            assert sorted(gone.text for gone in removed) == sorted(before - live)
            for each in (index, reader):
                assert {d.path: d.chunks for d in each.documents()} == {p: len(c) for p, c in model.items()}
                assert sorted(c.text for c in each.chunks()) == sorted(texts(each, "alpha", 99)) == sorted(live)
