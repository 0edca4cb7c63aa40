"""Tests `index` and `ask` with a server: the index lies here, the KV on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cacheblend_rag.cli import app
from tests.command_line import DOCUMENTS, as_json
from tests.server.running import KEY, RunningServer


@pytest.fixture
def run(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CACHEBLEND_API_KEY", KEY)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))

    def invoke(*args: object) -> Result:
        shared = ["--store", tmp_path / "index", "--server", server.url]
        return CliRunner().invoke(app, [str(arg) for arg in (*args, *shared)])

    return invoke


def test_documents_are_indexed_asked_about_and_removed_through_a_server(
    run, server: RunningServer, tmp_path: Path
) -> None:
    documents = tmp_path / "docs"
    documents.mkdir()
    for name, text in DOCUMENTS.items():
        (documents / name).write_text(text)
    report = as_json(run("index", documents, "--json"))
    known = server.get("/v1/chunks").json()["data"]
    assert report["chunks"] == len(known) == len(DOCUMENTS)
    assert all(chunk["stored"] and chunk["source"] for chunk in known)
    assert not (tmp_path / "index" / "kv").exists()
    answer = as_json(run("ask", "Who is the director?", "--max-tokens", 5, "--ratio", 0.5, "--json"))
    assert answer["mode"] == "blend"
    assert answer["usage"]["reused_tokens"] > 0
    (documents / "ships.txt").unlink()
    as_json(run("index", documents, "--json"))
    left = server.get("/v1/chunks").json()["data"]
    assert [Path(chunk["source"]).name for chunk in left] == ["observatory.md"]


def test_options_of_a_local_model_are_refused_with_a_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, word in [(("--device", "cpu"), "--device"), (("--ram-budget", "1GiB"), "--ram-budget")]:
        result = run("index", ".", *flags)
        assert (result.exit_code, word in result.stderr) == (2, True)
    wrong = run("index", ".", "--model", "another")
    assert (wrong.exit_code, "another" in wrong.stderr) == (5, True)
    monkeypatch.setenv("CACHEBLEND_API_KEY", "wrong")
    refused = run("index", ".")
    assert (refused.exit_code, "CACHEBLEND_API_KEY" in refused.stderr) == (5, True)
