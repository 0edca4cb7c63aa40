"""`cacheblend learn` trains a writer from documents for an index, and reports documents too short to learn from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cacheblend_lab.learn import learn as sizes
from tests.command_line import as_json

pytestmark = pytest.mark.slow


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Make enough documents of made-up words."""
    folder = tmp_path / "texts"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(30):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(250)]
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def test_a_writer_is_trained_and_an_index_is_written_with_it(run, model_dir, documents, texts, tmp_path, monkeypatch):
    monkeypatch.setitem(sizes._SIZES, "cpu", (420, 420, 0, 8, 2))
    command = ["learn", "--model", model_dir, "--documents", texts, "--out", tmp_path / "writer", "--steps", 4]
    found = as_json(run(*command, "--rank", 2, "--batch-tokens", 420, "--note", "made up", "--json"))
    assert found["saved"] == str(tmp_path / "writer")
    assert len(found["before"]) == len(found["best"]["kl"]) == len(found["ratios"]) == 2
    card = json.loads((tmp_path / "writer" / "writer.json").read_text())["card"]
    assert card["licences"] == "made up"
    store = ["--store", tmp_path / "store", "--model", model_dir, "--writer", tmp_path / "writer"]
    indexed = run("index", documents, *store, "--chunk-tokens", 40)
    assert indexed.exit_code == 0, indexed.stderr
    asked = run("ask", "What is the cargo of the Ivory Anchor?", *store, "--max-tokens", 4)
    assert asked.exit_code == 0, asked.stderr
    again = run(*command)
    assert again.exit_code != 0
    assert "stays as it is" in again.stderr


def test_too_few_documents_are_refused(run, model_dir, documents, tmp_path):
    found = run("learn", "--model", model_dir, "--documents", documents, "--out", tmp_path / "writer")
    assert found.exit_code != 0
    assert "too little to learn from" in found.stderr
    assert not (tmp_path / "writer").exists()
