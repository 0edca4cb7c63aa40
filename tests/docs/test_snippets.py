"""Runs the commands and programs of the tutorial and of pages about clients in order, and compares output with the pages.

A line after `$ ` in a `console` block is a command, and the other lines are its output. All `python` blocks of a test share one
namespace, as in one session; a `text` block is the output of the `python` block before it.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("sybil", reason="sybil is not installed; make setup installs it")
from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser

from cacheblend_rag.cli import app
from tests.command_line import spend_less
from tests.server.running import RunningServer

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial"
PORT = "8000"  # the port in the pages; the server of the tests gets a free port


class Reader:
    """Follows a page in one folder and one Python session."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.printed: str | None = None
        self.port = PORT
        self.left = contextlib.ExitStack()
        self.site = Sybil(
            parsers=[
                CodeBlockParser("console", self.run_commands),
                CodeBlockParser("python", self.run_program),
                CodeBlockParser("text", self.compare_printed),
            ]
        )

    def follow(self, page: Path) -> None:
        for example in self.site.parse(page):
            example.evaluate()

    def run_commands(self, example: Example) -> str | None:
        wrong = []
        for command, expected in commands_of(example.parsed):
            got = self.run(command.replace(PORT, self.port)).replace(self.port, PORT)
            if not matches(expected, got):
                wrong.append(f"$ {command}\nshows:\n{expected}\nprinted:\n{got}")
        return "\n".join(wrong) or None

    def run(self, command: str) -> str:
        """Return a command's output or error; `cacheblend` runs in this process, which has torch, and a server keeps running."""
        if command.startswith("cacheblend serve "):
            server = self.left.enter_context(served(shlex.split(command)[2:]))
            self.port = server.url.rpartition(":")[2]
            return ""
        if command.startswith("cacheblend "):
            result = CliRunner().invoke(app, shlex.split(command)[1:])
            # Pages do not show progress and warnings, which are on stderr.
            return result.stdout if result.exit_code == 0 else result.stderr[result.stderr.find("Error:") :]
        done = subprocess.run(
            command, shell=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout

    def run_program(self, example: Example) -> str | None:
        out = io.StringIO()
        code = compile(example.parsed.replace(PORT, self.port), example.path, "exec")
        try:
            with contextlib.redirect_stdout(out):
                exec(code, self.names)
        except Exception:
            return traceback.format_exc()
        self.printed = out.getvalue()
        return None

    def compare_printed(self, example: Example) -> str | None:
        got, self.printed = self.printed, None
        if got is None:
            return "There is no python block before it."
        return None if matches(example.parsed, got) else f"shows:\n{example.parsed}\nprinted:\n{got}"

    def close(self) -> None:
        for value in self.names.values():
            if not isinstance(value, type) and callable(getattr(value, "close", None)):
                value.close()
        self.left.close()


def commands_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with its shown output; a command that ends in a backslash continues."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.replace("\\\n", " ").partition("\n")
        yield command, expected


def matches(expected: str, got: str) -> bool:
    """Compare as doctest does: `...` stands for any text, and all white space is equal."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip() + "\n", got.strip() + "\n", flags)


def served(arguments: list[str]) -> RunningServer:
    """Return the server that a page starts, on a free port."""
    parser = argparse.ArgumentParser()
    for option in ("--store", "--port", "--api-key"):
        parser.add_argument(option, required=True)
    page, flags = parser.parse_known_args(arguments)
    # A given ratio always blends; for the pages' short prompts, measured times would otherwise decide whether to blend.
    return RunningServer(None, Path(page.store).absolute(), "--ratio", "0.05", *flags, key=page.api_key)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    spend_less(monkeypatch)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    for telemetry in ("HAYSTACK_TELEMETRY_ENABLED", "ANONYMIZED_TELEMETRY"):
        monkeypatch.setenv(telemetry, "False")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    reader = Reader()
    yield reader
    reader.close()


@pytest.mark.slow
def test_the_commands_of_the_tutorial_print_the_shown_output(reader: Reader) -> None:
    for page in ("index", "commands", "python", "chain"):
        reader.follow(TUTORIAL / f"{page}.md")


@pytest.mark.vllm
def test_the_commands_of_the_serving_pages_print_the_shown_output(reader: Reader) -> None:
    """All these pages use the server that the tutorial's page starts."""
    for package in ("vllm", "haystack", "langchain_openai", "chromadb"):
        pytest.importorskip(package, reason=f"{package} is not installed; make setup installs it")
    passages = keep_as_open_webui_does(Path("copy/vector_db"))
    for page in ("tutorial/serve.md", "howto/openai.md", "howto/haystack.md", "clients.md"):
        reader.follow(ROOT / "docs" / page)
    sources = [f'<source id="{at}" name="a.md">{text}</source>\n' for at, text in enumerate(passages, 1)]
    asked = [{"role": "user", "content": f"### Task:\nAnswer.\n<context>\n{''.join(sources)}</context>\nWho?"}]
    answer = reader.names["client"].chat.completions.create(model="bundled", max_tokens=2, messages=asked)
    assert answer.usage.cacheblend["reason"] == "stored KV for 2 of 2 chunks"


def keep_as_open_webui_does(folder: Path) -> list[str]:
    """Write a vector store as Open WebUI 0.12.4 does (retrieval/vector/dbs/chroma.py); return its passages."""
    import chromadb

    passages = [f"## Ship {number}\n\nThe vessel is commanded by the aunt of brother {number}." for number in range(2)]
    made = chromadb.PersistentClient(folder).create_collection("file-1", embedding_function=None)
    made.add(ids=["a", "b"], documents=passages, embeddings=[[1.0, 0.0], [0.0, 1.0]])
    return passages


def test_every_block_of_the_tutorial_is_run_except_for_pip_install() -> None:
    kinds = {"console", "python", "text", "{toctree}"}
    for page in sorted(TUTORIAL.glob("*.md")):
        blocks = re.findall(r"^```(\S+)\n(.*)", page.read_text("utf-8"), flags=re.MULTILINE)
        unknown = [first for kind, first in blocks if kind not in kinds]
        assert [line for line in unknown if not line.startswith("pip install ")] == [], page.name


def test_an_output_that_differs_from_the_shown_text_is_reported(reader: Reader, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for shown, fits in (("a ... c", True), ("a b", False), ("", False)):
        for block in (
            f"```console\n$ echo a b c\n{shown}\n```\n",
            f"```python\nprint('a b c')\n```\n\n```text\n{shown}\n```\n",
        ):
            page.write_text(block)
            with contextlib.nullcontext() if fits else pytest.raises(Exception, match="printed:\na b c"):
                reader.follow(page)
