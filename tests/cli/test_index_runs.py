"""Tests output and effects of `index` in successful, failed, stopped and concurrent runs, with a fake engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import Result

from cacheblend_rag.console import output
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.errors import ModelError, StoreError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.locking import indexing_alone, indexing_into
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store import ChunkKV, EntryFormat, KVKey, LayerKV, open_store, record_tiers
from tests.command_line import as_json
from tests.fake_engine import FakeEngine
from tests.retrieval import index_workers
from tests.retrieval.test_documents import write_pdf

Run = Callable[..., Result]


class Engine(FakeEngine):
    """Raises ``stop`` at a chunk that contains the word STOP."""

    stop: BaseException | None = None
    opened: int

    def precompute(self, chunks: Sequence[Chunk], progress: Any = None) -> PrecomputeReport:
        tokens = 0
        for chunk in chunks:
            if self.stop is not None and "STOP" in chunk.text:
                raise self.stop
            tokens += super().precompute([chunk], progress).tokens
        return PrecomputeReport(len(chunks), 0, tokens)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """The engine that every command gets, with the store that the command names."""

    class Mine(Engine):
        opened = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Mine.opened += 1

    monkeypatch.setattr(
        "cacheblend_rag.console.engines.open_any_engine",
        lambda chosen, store, budgets, ram_budget: Mine(open_store(store, *budgets.nbytes())),
    )
    monkeypatch.setattr(Embedder, "load", staticmethod(index_workers.load))
    return Mine


def _enter(directory: Path) -> None:
    with indexing_alone(directory):
        pass


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def index(run: Run, engine: type[Engine], documents: Path, store: Path) -> Callable[..., Result]:
    def invoke(*more: object, paths: Path = documents, stdin: str | None = None) -> Result:
        return run("index", paths, "--store", store, "--model", "fake", "--chunk-tokens", 24, *more, stdin=stdin)

    return invoke


def test_index_prints_the_amount_of_work_and_kv_beforehand(index):
    first = index()
    assert "To index: 2 documents, " in first.stderr
    said = re.search(r"Their KV will take about ([\d.]+) KiB; .* left for it", first.stderr)
    stored = re.search(r"KV  +([\d.]+) KiB stored", first.stdout)
    assert said and stored and 0.5 < float(said[1]) / float(stored[1]) < 2
    assert "To index" not in index().stderr


def test_index_warns_of_a_too_small_budget_before_it_is_used_up(index, engine, documents):
    (documents / "zzz.txt").write_text("The word STOP behind everything else.")
    engine.stop = KeyboardInterrupt()
    stopped = index("--disk-budget", "8000B", "--yes")
    assert "but the store has only 7.8 KiB left" in stopped.stderr and "--disk-budget" in stopped.stderr
    assert stopped.stderr.index("has only") < stopped.stderr.index("Stopped.")


@pytest.mark.parametrize("answer", ["", "n", "y"])
def test_kv_beyond_the_stores_capacity_is_computed_only_after_confirmation(
    index, engine, store, tmp_path, monkeypatch, answer
):
    (tmp_path / "before.txt").write_text("A text that was indexed before.")
    assert index(paths=tmp_path / "before.txt").exit_code == 0
    monkeypatch.setattr(
        "cacheblend_rag.cli.index.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: bool(answer)))
    )
    found = index("--disk-budget", "4000B", stdin=answer)
    said = " ".join(found.stderr.split())
    assert re.search(r"The KV of these \d+ chunks will take about [\d.]+ KiB, and the store can hold 3.9 KiB", said)
    assert re.search(r"Most is taken by \S+\.\w+ \(\d+ chunks, [\d.]+ KiB\); \S+ \(\d+ chunks, [\d.]+ KiB\)\.", said)
    with ChunkIndex(store) as opened:
        assert len(opened.documents()) == (3 if answer == "y" else 1)
        (old,) = opened.chunks_of(str(tmp_path / "before.txt"))
    if answer == "y":
        assert found.exit_code == 0 and "Index them all the same?" in said and "Warning: " in said
        return
    assert found.exit_code == (1 if answer else 3) and ("--yes" in said) == (not answer)
    assert open_store(store).contains(engine().key(old)), "what was stored stays"


@pytest.mark.slow
def test_ctrl_c_reports_the_indexed_part_and_the_next_run_continues(index, engine, documents, store):
    text = "\n\n".join(f"Part {n} of the log of the ship, which goes on and on." for n in range(8))
    (documents / "zzz.txt").write_text(text + "\n\nHere is the word STOP.")
    engine.stop = KeyboardInterrupt()
    stopped = index()
    assert stopped.exit_code == 130
    assert "2 of 3 documents indexed, and the KV of " in stopped.stderr and "chunks of zzz.txt" in stopped.stderr
    assert "Run the same command again to go on" in stopped.stderr
    engine.stop = None
    again = as_json(index("--json"))
    assert [Path(path).name for path in again["added"]] == ["zzz.txt"] and len(again["unchanged"]) == 2


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_fails_leaves_no_empty_store_behind(index, engine, documents, store, made):
    (documents / "aaa.txt").write_text("STOP")
    engine.stop = ModelError("no memory")
    if made:
        store.mkdir()
    assert index().exit_code == 4
    assert store.exists() == made and not (made and any(store.iterdir()))


def test_indexing_only_unusable_files_leaves_no_store_behind(run, engine, store, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert run("index", tmp_path / "empty.txt", "--store", store, "--model", "fake").exit_code == 2
    assert not store.exists()


def test_a_path_that_does_not_exist_is_refused_before_a_model_is_loaded(run, store, tmp_path, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.console.engines.open_any_engine", lambda *_: pytest.fail("loaded"))
    result = run("index", tmp_path / "nowhere.md", "--store", store, "--model", "fake")
    assert result.exit_code == 2 and "nowhere.md" in result.stderr and not store.exists()


def test_an_unloadable_embedding_model_is_reported_before_any_kv_is_computed(index, engine, store, monkeypatch):
    def load(name: str) -> None:
        raise ModelError(f"The embedding model {name!r} cannot be loaded")

    monkeypatch.setattr(Embedder, "load", staticmethod(load))
    monkeypatch.setattr(engine, "precompute", lambda *_: pytest.fail("computed"))
    result = index("--embedding", "mistyped/model")
    assert result.exit_code == 4 and "mistyped/model" in result.stderr and not store.exists()


def test_documents_indexed_before_a_failed_run_stay_indexed(index, engine, documents, store):
    index()
    (documents / "aaa.txt").write_text("STOP")
    engine.stop = ModelError("no memory")
    assert index().exit_code == 4
    with ChunkIndex(store) as opened:
        assert len(opened.documents()) == 2


def test_a_second_run_on_the_same_index_is_refused_before_a_model_is_loaded(index, store, monkeypatch):
    index()
    monkeypatch.setattr("cacheblend_rag.console.engines.open_any_engine", lambda *_: pytest.fail("loaded"))
    with ThreadPoolExecutor(1) as other, ExitStack() as held:
        other.submit(held.enter_context, indexing_alone(store)).result()
        result = index()
        other.submit(held.close).result()
    assert result.exit_code == 3 and "Another run is indexing into" in result.stderr


def test_the_lock_is_held_from_the_loading_of_the_model_to_the_end(index, store, engine, monkeypatch):
    def held() -> bool:
        with ThreadPoolExecutor(1) as other:
            return isinstance(other.submit(_enter, store).exception(), StoreError)

    seen: list[bool] = []

    def opened(chosen: Any, directory: Path, *_: Any) -> Engine:
        seen.append(held())
        return engine(open_store(directory))

    def precompute(self: Engine, chunks: Sequence[Chunk], progress: Any = None) -> PrecomputeReport:
        seen.append(held())
        return FakeEngine.precompute(self, chunks, progress)

    monkeypatch.setattr("cacheblend_rag.console.engines.open_any_engine", opened)
    monkeypatch.setattr(engine, "precompute", precompute)
    assert index().exit_code == 0
    assert len(seen) > 1 and all(seen) and not held()


class Ticks:
    """Stands for the event that ends the lines: each wait advances time and work by a step."""

    def __init__(self, *steps: Callable[[], None]):
        self.steps = list(steps)

    def wait(self, seconds: float) -> bool:
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


def test_piped_progress_is_a_line_every_few_seconds_with_the_time_left(capsys):
    now = [0.0]
    lines = output._Lines("Indexing", lambda: now[0])

    def work(done: int, seconds: float) -> Callable[[], None]:
        def step() -> None:
            now[0] += seconds
            if done:
                lines(done, 100, "big.pdf")

        return step

    begun = [work(0, 5), lambda: lines(0, 100, "big.pdf"), work(0, 5)]
    output._write_until(Ticks(*begun, work(5, 0), work(50, 45), work(0, 10)), lines.line)
    assert capsys.readouterr().err.splitlines() == [
        "Indexing big.pdf: 0 of 100",  # the rate is not known yet
        "Indexing big.pdf: 0 of 100",
        "Indexing big.pdf: 5 of 100, about 2 min left",
        "Indexing big.pdf: 50 of 100, about 50 s left",
        "Indexing big.pdf: 50 of 100, about 60 s left",
    ]


def test_piped_status_prints_a_line_only_if_its_text_changes(capsys):
    texts: list[str] = []
    news = [
        lambda: texts.extend(["warm-up", "full: 0.2 requests/s"]),
        lambda: None,
        lambda: texts.append("full: 0.3 requests/s"),
    ]
    output._write_until(Ticks(lambda: None, *news), lambda: output._last("Measuring", texts))
    assert capsys.readouterr().err.splitlines() == [
        "Measuring: full: 0.2 requests/s",
        "Measuring: full: 0.3 requests/s",
    ]


def test_the_threads_that_print_progress_end_with_the_work(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    before = threading.active_count()
    with output.progress("Indexing") as show, output.status("Measuring") as say:
        show(1, 2, "a.txt")
        say("warm-up")
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_an_answer_from_a_pdf_cites_the_page(run, index, engine, documents, store):
    write_pdf(documents / "book.pdf", ["Nothing of interest.", "The lighthouse keeper is called Orla Fenwick."])
    index("--chunk-tokens", 16)
    found = run("ask", "Who is the lighthouse keeper?", "--store", store, "--model", "fake", "--k", 20)
    assert "book.pdf, page 2 (" in found.stdout, found.output
    sources = as_json(run("ask", "Who?", "--store", store, "--model", "fake", "--k", 20, "--json"))["sources"]
    assert {source["page"] for source in sources if source["path"].endswith("book.pdf")} == {1, 2}


def test_include_and_exclude_patterns_choose_the_indexed_files(index):
    assert [Path(p).name for p in as_json(index("--json", "--include", "*.md"))["added"]] == ["observatory.md"]
    found = as_json(index("--json", "--exclude", "*.md"))
    assert [Path(p).name for p in found["added"]] == ["ships.txt"] and not found["removed"]


def test_a_run_without_documents_keeps_the_permissions_of_an_empty_directory(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o770)
    with indexing_into(directory):
        pass
    assert directory.stat().st_mode & 0o777 == 0o770


def test_a_run_with_nothing_to_do_loads_no_model_and_gives_the_usual_report(index, engine, documents, store):
    index()
    (documents / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    again = as_json(index("--json"))
    assert engine.opened == 1
    looked = as_json(index("--json", "--disk-budget", "1GiB"))
    assert engine.opened == 2, "what it is told of the store is for whoever opens it"
    assert {**again, "seconds": 0} == {**looked, "seconds": 0}
    assert len(again["unchanged"]) == 2 and again["skipped"] and again["kv_bytes"] > 0


@pytest.mark.parametrize("change", ["text", "new", "gone", "no KV", "chunks"])
def test_a_run_with_something_to_do_loads_a_model(index, engine, documents, store, change):
    index()
    if change == "text":
        (documents / "ships.txt").write_text("The Proud Gull was sold.")
    elif change == "new":
        (documents / "bells.txt").write_text("A bell rings at noon.")
    elif change == "gone":
        (documents / "ships.txt").unlink()
    elif change == "no KV":
        next(file for file in sorted((store / "kv").rglob("*")) if file.is_file()).unlink()
    found = index(*(["--chunk-tokens", 30] if change == "chunks" else []))
    assert engine.opened == 2
    assert (found.exit_code == 0) == (change != "chunks"), found.stderr


def test_an_empty_folder_is_reported_before_a_model_is_loaded(run, engine, store, tmp_path):
    (tmp_path / "empty").mkdir()
    found = run("index", tmp_path / "empty", "--store", store, "--model", "fake")
    assert (found.exit_code, engine.opened) == (2, 0)
    assert "none found" in found.stdout and not store.exists()


def test_an_empty_question_is_refused_before_a_model_is_loaded(run, index, engine, store):
    index()
    found = run("ask", " ", "--store", store, "--model", "fake")
    assert (found.exit_code, engine.opened) == (2, 1)
    assert "The question is empty" in found.stderr


def test_documents_too_large_for_the_store_are_refused_after_one_computed_chunk(index, engine, documents, monkeypatch):
    computed: list[str] = []

    def precompute(self: Engine, chunks: Sequence[Chunk], progress: Any = None) -> PrecomputeReport:
        computed.extend(chunk.text for chunk in chunks)
        return FakeEngine.precompute(self, chunks, progress)

    monkeypatch.setattr(engine, "precompute", precompute)
    (documents / "aaa.csv").write_text("ship,cargo\n" + "".join(f"Gull {n},grain\n" for n in range(99)))
    found = index("--disk-budget", "9000B")
    assert found.exit_code == 3 and len(computed) == 1
    assert re.search(r"Most is taken by \S+aaa\.csv \(\d+ chunks, ", " ".join(found.stderr.split()))


@pytest.fixture
def snapshot(store: Path) -> Callable[[], dict[Path, bytes]]:
    def take() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in store.rglob("*") if each.is_file()}

    return take


def test_a_dry_run_lists_documents_by_size_and_stores_nothing(index, documents, store, tmp_path):
    (documents / "ships.csv").write_text("ship,cargo\n" + "".join(f"Gull {n},grain\n" for n in range(50)))
    before = set(tmp_path.iterdir())
    found = index("--dry-run")
    assert found.exit_code == 0 and not store.exists() and set(tmp_path.iterdir()) == before
    heading, first, *_, total = [line for line in found.stdout.splitlines() if line[:1] in "d/3"]
    assert heading.split() == ["document", "chunks", "tokens", "KV", "time"]
    assert "ships.csv" in first and total.startswith("3 documents")
    assert "Nothing was indexed" in found.stdout


def test_a_dry_run_estimates_the_kv_of_the_real_run(index, documents):
    estimated = as_json(index("--dry-run", "--json"))
    report = as_json(index("--json"))
    assert {Path(each["path"]).name for each in estimated["documents"]} == {"observatory.md", "ships.txt"}
    assert estimated["documents"][0]["tokens"] >= estimated["documents"][1]["tokens"]
    assert sum(each["chunks"] for each in estimated["documents"]) == report["chunks"] == estimated["plan"]["chunks"]
    assert estimated["plan"]["tokens"] == report["tokens"]
    assert 0.5 < estimated["plan"]["kv_bytes"] / report["kv_bytes"] < 2
    assert all(each["seconds"] > 0 and each["kv_bytes"] > 0 for each in estimated["documents"])


def test_a_dry_run_on_a_store_counts_only_new_documents_and_changes_no_file(index, documents, snapshot):
    index()
    before = snapshot()
    (documents / "bells.txt").write_text("A bell rings at noon.")
    found = as_json(index("--dry-run", "--json"))
    assert [Path(each["path"]).name for each in found["documents"]] == ["bells.txt"] and found["unchanged"] == 2
    (documents / "bells.txt").unlink()
    assert "Nothing to index." in index("--dry-run").stdout
    assert snapshot() == before


def test_a_dry_run_reports_too_much_kv(index, store):
    found = index("--dry-run", "--disk-budget", "4000B")
    assert found.exit_code == 0 and "Too much: the store can hold 3.9 KiB" in found.stdout
    assert not store.exists()


def test_a_dry_run_refuses_options_that_would_change_a_store(index, store):
    found = index("--dry-run", "--kv", "ram://")
    assert found.exit_code == 2 and "--kv changes a store" in found.stderr and not store.exists()


def test_a_dry_run_counts_lossy_kv_at_its_encoded_size(index, store, documents):
    record_tiers(store, "file://?codec=int8")
    assert index().exit_code == 0
    (documents / "bells.txt").write_text("A bell rings at noon.")
    found = as_json(index("--dry-run", "--json"))["plan"]
    computed = ChunkKV([LayerKV(*torch.zeros(2, 1, found["tokens"], 2))], 0)
    assert found["kv_bytes"] == EntryFormat("int8").encode(KVKey("0" * 40), computed).nbytes


def test_a_dry_run_of_text_whose_kv_is_all_stored_takes_no_disk(index, documents):
    index()
    (documents / "copy.txt").write_text((documents / "ships.txt").read_text())
    (found,) = as_json(index("--dry-run", "--json"))["documents"]
    assert (Path(found["path"]).name, found["tokens"], found["kv_bytes"], found["seconds"]) == ("copy.txt", 0, 0, 0)
