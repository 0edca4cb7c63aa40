"""Tests the default model of commands: the index's model, otherwise SmolLM2 with a line on stderr, bundled for its corpus."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cacheblend_rag import cli
from cacheblend_rag.console import engines
from cacheblend_rag.demo.bundle import bundled_corpus
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.retrieval.database import IndexConfig
from cacheblend_rag.retrieval.documents import file_digest
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stop every command where it would load its model."""
    calls: list[Any] = []

    def load(*arguments: Any) -> None:
        calls.append(arguments)
        raise ModelError("no model is loaded here")

    # A command's module that is first imported later would keep a patched function of another module.
    for module in pkgutil.iter_modules(cli.__path__, "cacheblend_rag.cli."):
        importlib.import_module(module.name)
    for place in (
        "cacheblend_rag.cli.doctor.open_engine",
        "cacheblend_lab.commands.eval.open_engine",
        "cacheblend_rag.console.engines.open_engine",
        "cacheblend_rag.console.engines.open_server",
    ):
        monkeypatch.setattr(place, load)
    monkeypatch.setattr("cacheblend_rag.server.launch.serve", load)
    return calls


def indexed(directory: Path, file: Path, model: str, writer: WrittenBy | None = None, dtype: str | None = None) -> Path:
    with (
        ChunkIndex(directory, IndexConfig(ModelFingerprint("0" * 32, model, dtype), writer=writer)) as index,
        index.transaction(),
    ):
        digest = file_digest(file)
        assert digest is not None
        index.replace_document(str(file), digest, [Chunk("0" * 32, "text", (1,))], {})
    return directory


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.md").write_text("My own notes.")
    return tmp_path / "own.md"


def taken(result: Result, loads: list[Any]) -> tuple[str | None, bool]:
    """Return the model that was to be loaded, and whether stderr names SmolLM2 as the default."""
    assert len(loads) == 1, result.output
    return loads.pop()[0].model, "Without --model it is smollm2" in result.stderr


@pytest.mark.parametrize(("command", "stdin"), [(["ask", "Why?"], None), (["chat"], "Why?\n")])
def test_questions_are_answered_by_the_model_that_the_index_was_made_with(
    run: Run, own: Path, loads: list[Any], tmp_path: Path, command: list[str], stdin: str | None
) -> None:
    for name in ("acme/llm", "smollm2", "bundled"):
        store = indexed(tmp_path / name, own, name)
        assert taken(run(*command, "--store", store, stdin=stdin), loads) == (name, False)
        assert taken(run(*command, "--store", store, "--model", "other/llm", stdin=stdin), loads) == (
            "other/llm",
            False,
        )
        assert taken(run(*command, "--store", store, "--server", "http://127.0.0.1:9"), loads) == (None, False)


def test_own_documents_are_indexed_by_smollm2_and_bundled_documents_by_the_bundled_model(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    new = ["--store", tmp_path / "new"]
    assert taken(run("index", own, *new), loads) == ("smollm2", True)
    assert taken(run("index", bundled_corpus(), own, *new), loads) == ("smollm2", True)
    assert taken(run("index", bundled_corpus(), *new), loads) == ("bundled", False)
    assert taken(run("index", own, *new, "--model", "acme/llm"), loads) == ("acme/llm", False)
    assert taken(run("index", own, *new, "--model", "bundled"), loads) == ("bundled", False)
    assert taken(run("index", own, *new, "--server", "http://127.0.0.1:9"), loads) == (None, False)
    assert taken(run("index", bundled_corpus(), "--store", indexed(tmp_path / "a", own, "acme/llm")), loads) == (
        "acme/llm",
        False,
    )


def test_own_documents_are_refused_in_an_index_of_the_bundled_model_unless_it_is_named(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    store = indexed(tmp_path / "store", bundled_corpus() / "ship-logs.md", "bundled")
    refused = run("index", own, "--store", store)
    assert (refused.exit_code, loads) == (2, [])
    assert "knows the documents of `cacheblend demo` alone" in refused.stderr
    assert taken(run("index", own, "--store", store, "--model", "bundled"), loads) == ("bundled", False)
    assert taken(run("index", bundled_corpus(), "--store", store), loads) == ("bundled", False)


def test_a_users_data_set_is_evaluated_by_smollm2_and_the_default_by_the_bundled_model(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    own.write_text('{"question": "Why?", "answers": ["So."], "chunks": ["So it is."]}\n')
    assert taken(run("eval", "--dataset", own, "--out", tmp_path), loads) == ("smollm2", True)
    assert taken(run("eval", "--out", tmp_path), loads) == ("bundled", False)


@pytest.mark.slow
def test_a_server_serves_the_model_of_its_stores_index_or_else_smollm2(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    assert taken(run("serve", "--store", tmp_path / "new"), loads) == ("smollm2", True)
    assert taken(run("serve", "--store", indexed(tmp_path / "store", own, "acme/llm")), loads) == ("acme/llm", False)
    assert taken(run("serve", "--store", tmp_path / "store", "--model", "bundled"), loads) == ("bundled", False)
    for more, writer in (([], "none"), (["--writer", "own"], "own")):
        run("serve", "--store", tmp_path / "store", *more)
        assert loads.pop()[0].writer == writer


def test_an_index_keeps_its_kv_writer_and_a_new_index_gets_the_models_own_writer(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    def writer(store: Path, *more: object, command: tuple[object, ...] = ("ask", "Why?")) -> str | None:
        run(*command, "--store", store, *more)
        writer: str | None = loads.pop()[0].writer
        return writer

    (tmp_path / "hand").mkdir()
    (tmp_path / "new.md").write_text("What no index has yet.")
    hand = str(tmp_path / "hand")
    here = indexed(tmp_path / "here", own, "smollm2", WrittenBy("ab", hand))
    gone = indexed(tmp_path / "gone", own, "smollm2", WrittenBy("ab", str(tmp_path / "away")))
    plain = indexed(tmp_path / "plain", own, "smollm2")
    for command in (("ask", "Why?"), ("doctor",)):
        assert writer(here, command=command) == writer(here, "--model", "smollm2", command=command) == hand
    for command in (("ask", "Why?"), ("index", own, tmp_path / "new.md"), ("doctor",)):
        # The writer may have moved with this package; None stands for the model's own writer.
        assert writer(gone, command=command) is None
        assert writer(plain, command=command) == "none", "its KV is there, and goes on being used"
        assert writer(plain, "--writer", "smollm2", command=command) == "smollm2"
        assert writer(plain, "--model", "acme/llm", command=command) is None
    assert writer(tmp_path / "new", command=("index", own)) is None


@pytest.mark.slow
def test_commands_run_a_model_in_the_dtype_of_the_index_unless_another_is_given(
    run: Run, own: Path, loads: list[Any], tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    store = ["--store", indexed(tmp_path / "store", own, "acme/llm", dtype="bfloat16")]

    def loaded(*command: object) -> Any:
        run(*command)
        return loads.pop()

    for command in (["ask", "Why?"], ["index", own, tmp_path], ["doctor"]):
        assert loaded(*command, *store)[0].dtype == "bfloat16"
        assert loaded(*command, *store, "--dtype", "float32")[0].dtype == "float32"
        assert loaded(*command, *store, "--model", "other/llm")[0].dtype is None
    assert loaded("serve", *store)[1] == ["--dtype", "bfloat16"]
    assert loaded("serve", *store, "--dtype", "float32")[1][-2:] == ["--dtype", "float32"]
    assert loaded("serve", *store, "--model", "other/llm")[1] == []
    # An index of an older version records no dtype.
    assert loaded("ask", "Why?", "--store", indexed(tmp_path / "old", own, "acme/llm"))[0].dtype is None


def test_a_model_directory_becomes_an_absolute_path_and_other_names_stay_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "smollm2"):
        (tmp_path / name).mkdir()
    found = [engines.found_anywhere(name) for name in ("mine", "./smollm2", "smollm2", "acme/llm", None)]
    assert found == [str(tmp_path / "mine"), str(tmp_path / "smollm2"), "smollm2", "acme/llm", None]
