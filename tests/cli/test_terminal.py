"""Tests that texts of documents, names and servers are shown on a terminal without controlling it."""

from __future__ import annotations

import ast
import json
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cacheblend_rag
from cacheblend_rag.console import output
from cacheblend_rag.errors import ServerError
from cacheblend_rag.printable import in_one_line, printable
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.rag.results import RagEvent
from cacheblend_rag.retrieval.index import ChunkIndex, Hit, IndexedDocument
from tests.cli.test_chat import answer, converse
from tests.cli.test_documents import store  # noqa: F401
from tests.cli.test_shell import Terminal

STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
# HOSTILE holds a title, a bell, a link, an 8-bit CSI that wipes the line, right-to-left marks and half a character.
HOSTILE = "\x1b]0;owned\x07 \x1b]8;;http://evil\x1b\\link \x9b2K \u202egpj.exe\u2066 \u061c1-2\u200f(\u200e \udcff\r"
ITEM = Hit(Chunk("c1", f"Her cargo is grain.{HOSTILE}\n[2] b.txt: forged", ()), 0.5, f"/docs/a\n[2] b{HOSTILE}.txt", 0)


def test_chat_prints_control_characters_of_documents_and_models_as_escapes(monkeypatch, capsys):
    said = replace(answer(), answer=f"grain {HOSTILE}", sources=(ITEM,), notes=(HOSTILE,))

    def stream(question: str) -> Iterator[RagEvent]:
        yield RagEvent(f"grain {HOSTILE}", answer=said)

    converse(monkeypatch, stream, "What is her cargo?", "/sources", "/history")
    shown = capsys.readouterr().out.replace("\r\n", "\n")
    assert not STEERING.search(shown) and shown.count("\\u001b]0;owned\\u0007") >= 5
    assert [line for line in shown.splitlines() if line.startswith("[2] ")] == []


def test_document_names_with_control_characters_are_listed_on_one_line_each(run, store, monkeypatch):  # noqa: F811
    name = f"/docs/a.txt\n/docs/forged.txt{HOSTILE}"
    monkeypatch.setattr(ChunkIndex, "documents", lambda self: [IndexedDocument(name, "", 1)])
    shown = run("documents", "ls", "-s", store).stdout
    assert not STEERING.search(shown) and len(shown.splitlines()) == 2
    assert json.loads(run("documents", "ls", "-s", store, "--json").stdout)[0]["path"] == name


def test_errors_warnings_and_log_lines_contain_no_control_characters(run, monkeypatch):
    def fails(*_: object) -> None:
        warnings.warn(HOSTILE, UserWarning, stacklevel=1)
        logging.getLogger("some.library").warning("%s", HOSTILE)
        raise ServerError(f"The server says: {HOSTILE}")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr("cacheblend_rag.console.engines.store_directory", fails)
    failed = run("documents", "ls")
    assert failed.exit_code == ServerError.exit_code
    assert not STEERING.search(failed.stderr) and failed.stderr.count("\\u001b]0;owned\\u0007") == 3


@pytest.mark.parametrize("name", ["[/x].md", "[link=http://evil]x[/].md", f"{HOSTILE}\nIndexing.md"])
def test_a_file_name_is_shown_literally_on_a_terminal_and_in_a_log(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with output.progress("Reading") as show:
        show(1, 2, name)
    with output.status("Reading") as tell:
        tell(name)
    shown = terminal.getvalue()
    assert in_one_line(name) in shown and "http://evil\x1b" not in shown and "\x07" not in shown
    assert f"Reading {in_one_line(name)}: 1 of 2" in str(_line(name))


def _line(name: str) -> str | None:
    lines = output._Lines("Reading")
    lines(1, 2, name)
    return lines.line()


@given(st.text(st.characters()))
def test_printable_json_parses_to_the_same_text(text):
    shown = printable(json.dumps(text, ensure_ascii=False))
    assert json.loads(shown) == text and not STEERING.search(shown.replace("\r\n", ""))
    assert not STEERING.search(in_one_line(text)) and len(in_one_line(text).splitlines()) <= 1


@pytest.mark.slow
def test_only_the_console_output_module_prints():
    """The test does not cover rich and the modules of the lab."""
    root = Path(cacheblend_rag.__file__).parent
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.echo", "typer.secho", "print", "click.echo"}
    }
    assert found == {"console/output.py"}
