"""Who leaves the model to the bundled one is told that it knows the bundled documents alone."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cacheblend_rag import cli
from cacheblend_rag.console.engines import MODELS_TO_TRY
from cacheblend_rag.demo.bundle import bundled_corpus
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.config import IndexConfig
from cacheblend_rag.retrieval.documents import file_digest
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.kv import ModelFingerprint

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stop every command where it would load its model."""
    calls: list[Any] = []

    def load(*arguments: Any) -> None:
        calls.append(arguments)
        raise ModelError("no model is loaded here")

    # A command's module that is first imported now would keep what stands in for another's function.
    for module in pkgutil.iter_modules(cli.__path__, "cacheblend_rag.cli."):
        importlib.import_module(module.name)
    for place in ("lab.commands.eval.open_engine", "console.engines.open_engine", "console.engines.open_server"):
        monkeypatch.setattr(f"cacheblend_rag.{place}", load)
    return calls


def indexed(directory: Path, file: Path, model: str) -> Path:
    with (
        ChunkIndex.open(directory, IndexConfig(ModelFingerprint("0" * 32, model))) as index,
        index._database.transaction(),
    ):
        digest = file_digest(file)
        assert digest is not None
        index._database.replace_document(str(file), digest, [Chunk("0" * 32, "text", (1,))], {})
    return directory


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.md").write_text("My own notes.")
    return tmp_path / "own.md"


def told(result: Result, loads: list[Any]) -> bool:
    assert len(loads) == 1, result.output
    return all(name in result.stderr for name in MODELS_TO_TRY)


@pytest.mark.parametrize(("command", "stdin"), [(["ask", "Why?"], None), (["chat"], "Why?\n")])
def test_questions_to_own_documents_say_so_every_time(run: Run, own: Path, loads, tmp_path, command, stdin):
    store = indexed(tmp_path / "store", own, "bundled")
    for _ in range(2):
        assert told(run(*command, "--store", store, stdin=stdin), loads)
        loads.clear()


def test_nothing_is_said_of_the_bundled_documents_another_model_or_a_server(run: Run, own: Path, loads, tmp_path):
    corpus = indexed(tmp_path / "corpus", bundled_corpus() / "ship-logs.md", "bundled")
    other = indexed(tmp_path / "other", own, "acme/llm")
    mine = indexed(tmp_path / "mine", own, "bundled")
    for arguments in (
        ["--store", corpus],
        ["--store", other],
        ["--store", mine, "--model", "bundled"],
        ["--store", mine, "--server", "http://127.0.0.1:9"],
    ):
        assert not told(run("ask", "Why?", *arguments), loads), arguments
        loads.clear()


def test_indexing_own_documents_says_so_before_the_work(run: Run, own: Path, loads, tmp_path):
    assert told(run("index", bundled_corpus(), own, "--store", tmp_path / "s"), loads)
    loads.clear()
    assert not told(run("index", bundled_corpus(), "--store", tmp_path / "s"), loads)
    loads.clear()
    assert not told(run("index", own, "--store", tmp_path / "s", "--model", "acme/llm"), loads)


def test_evaluating_on_another_data_set_says_so(run: Run, own: Path, loads, tmp_path):
    assert told(run("eval", "--dataset", own, "--out", tmp_path), loads)
    loads.clear()
    assert not told(run("eval", "--out", tmp_path), loads)
