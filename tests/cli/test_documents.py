"""Tests `cacheblend documents`: listing documents, and removing documents with their KV."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import Result

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.rag.locking import indexing_alone
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.store import DiskStore
from cacheblend_rag.store.kv import read_whole
from tests.command_line import as_json
from tests.fake_engine import FakeEngine
from tests.retrieval import index_workers

Run = Callable[..., Result]
SHARED = "Both logs say this, word for word."


@pytest.fixture
def store(tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three documents, two of which share a chunk."""
    monkeypatch.setattr(Embedder, "load", staticmethod(index_workers.load))
    (documents / "logs").mkdir()
    for name in ("a.txt", "b.txt"):
        (documents / "logs" / name).write_text(f"{SHARED}\n\nThis only {name} has.")
    directory = tmp_path / "store"
    engine = FakeEngine(DiskStore(directory))
    with RagPipeline(engine, directory, chunk_tokens=24) as pipeline:
        pipeline.index([documents])
    engine.close()
    return directory


def listed(run: Run, store: Path) -> dict[str, int]:
    return {Path(row["path"]).name: row["chunks"] for row in as_json(run("documents", "ls", "-s", store, "--json"))}


def entries(store: Path) -> int:
    return len(list(DiskStore(store).entries()))


def test_documents_are_listed_with_their_chunks(run, store, documents):
    assert listed(run, store).keys() == {"observatory.md", "ships.txt", "a.txt", "b.txt"}
    assert str(documents / "logs" / "a.txt") in run("documents", "ls", "--store", store).stdout


def test_removing_a_document_removes_the_kv_of_chunks_that_no_other_document_holds(run, store, documents):
    chunks, before = listed(run, store), entries(store)
    (removed,) = as_json(run("documents", "rm", documents / "logs" / "a.txt", "--store", store, "--json"))
    assert "a.txt" not in listed(run, store)
    assert (removed["chunks"], removed["removed"]) == (chunks["a.txt"], chunks["a.txt"] - 1) and removed["nbytes"] > 0
    assert entries(store) == before - removed["removed"]
    found = run("documents", "rm", documents / "logs" / "b.txt", "--store", store)
    assert "b.txt removed, with " in found.stdout and "stay" not in found.stdout
    assert entries(store) == before - 2 * removed["removed"] - 1


@pytest.mark.parametrize("ranks", [2, 24])
def test_shards_of_several_workers_are_listed_and_removed_as_one_entry(run, store, documents, ranks):
    engine = FakeEngine(DiskStore(store))
    with RagPipeline(engine, store) as pipeline:
        chunk = next(c for c in pipeline.chunks.chunks() if "only a.txt" in c.text)
    for rank in range(ranks):
        shard = Entries(engine.store, engine.fingerprint, engine.header_ids, rank, ranks)
        whole = Entries(engine.store, engine.fingerprint, engine.header_ids).get(chunk.token_ids, 1)
        assert whole is not None
        shard.put(chunk.token_ids, read_whole(whole))
    engine.store.delete(engine.key(chunk))
    (row,) = (row for row in as_json(run("store", "ls", "-s", store, "--json")) if row["id"] == chunk.id)
    assert row["nbytes"] == sum(e.nbytes for e in engine.store.entries() if e.key[:40] == engine.key(chunk)[:40])
    before = entries(store)
    assert run("documents", "rm", "a.txt", "--store", store).exit_code == 0
    assert entries(store) == before - ranks


def test_rm_takes_a_directory_or_a_unique_file_name(run, store, documents):
    assert run("documents", "rm", documents / "logs", "ships.txt", "--store", store).exit_code == 0
    assert listed(run, store).keys() == {"observatory.md"}


def test_removing_an_unindexed_file_is_an_input_error_and_removes_nothing(run, store):
    result = run("documents", "rm", "ships.txt", "ship.txt", "--store", store)
    assert result.exit_code == 2 and "ship.txt is not in the index" in result.stderr and "documents ls" in result.stderr
    assert "ships.txt" in listed(run, store)


def test_an_empty_name_removes_nothing(run, store, documents, monkeypatch):
    monkeypatch.chdir(documents)
    result = run("documents", "rm", "", "--store", store)
    assert result.exit_code == 2 and "A name is empty" in result.stderr
    assert "ships.txt" in listed(run, store)


def test_nothing_is_removed_while_another_run_indexes(run, store):
    with ThreadPoolExecutor(1) as other, ExitStack() as held:
        other.submit(held.enter_context, indexing_alone(store)).result()
        assert run("documents", "rm", "ships.txt", "--store", store).exit_code == 3
        other.submit(held.close).result()
    assert "ships.txt" in listed(run, store)


def test_an_id_prefix_of_less_than_6_characters_is_refused(run, store):
    result = run("store", "rm", "d8f8", "--store", store)
    assert result.exit_code == 2 and "at least 6 characters" in result.stderr


def test_removed_kv_is_reported_as_json(run, store):
    items = as_json(run("store", "ls", "--store", store, "--json"))
    item = next(item for item in items if item["path"].endswith("ships.txt"))
    assert as_json(run("store", "rm", item["id"], "--store", store, "--json")) == [
        {"id": item["id"], "freed_bytes": item["nbytes"]}
    ]


@pytest.mark.parametrize("before", [["--store"], ["-s"]])
def test_documents_without_a_subcommand_lists_the_documents(run, store, documents, before):
    found = run("documents", *before, store)
    assert found.exit_code == 0 and str(documents / "logs" / "a.txt") in found.stdout, found.output
    assert as_json(run("documents", *before, store, "--json")) == as_json(run("documents", "ls", "-s", store, "--json"))


def test_documents_without_options_lists_the_users_own_store(run, store, documents, home):
    home.mkdir(exist_ok=True)
    store.rename(home / "store")
    assert str(documents / "logs" / "a.txt") in run("documents").stdout
    assert "rm" in run("documents", "--help").stdout


def test_documents_are_listed_without_waiting_for_torch(store):
    code = "import sys; from cacheblend_rag.cli import app; app(standalone_mode=False); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "documents", "ls", "--store", str(store)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "a.txt" in found and found.splitlines()[-1] == "False"
