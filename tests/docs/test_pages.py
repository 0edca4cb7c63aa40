"""Tests that things named on the pages exist: links, headings, public names, commands, families of models."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from typer.main import get_command

import cacheblend_rag
from cacheblend_rag import errors
from cacheblend_rag.cli import app
from cacheblend_rag.cli.serve import serve

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in ROOT.glob("docs/**/*.md") if not {"_build", "generated"} & set(page.parts)),
    *ROOT.glob("integrations/*/README.md"),
    *ROOT.glob("examples/**/*.md"),
]
PARSER = MarkdownIt("commonmark").enable("table")


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the text and target of each link and picture that leads to a file of ours."""
    for block in PARSER.parse(page.read_text(encoding="utf-8")):
        children = block.children or []
        for at, token in enumerate(children):
            target = str(token.attrGet("href" if token.type == "link_open" else "src") or "")
            if target and not re.match(r"[a-z]+:", target):
                yield children[at + 1].content if token.type == "link_open" else token.content, unquote(target)
            if token.type == "html_inline":
                yield from (("picture", name) for name in re.findall(r'src="([^":]+)"', token.content))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page and of its included pages: headings, as GitHub and MyST write them."""
    text = page.read_text(encoding="utf-8")
    for included in re.findall(r"^```\{include\} (\S+\.md)$", text, flags=re.MULTILINE):
        text += (page.parent / included).read_text(encoding="utf-8")
    tokens = PARSER.parse(text)
    headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere_and_has_a_text(page: Path) -> None:
    assert wrong_links(page) == []


def wrong_links(page: Path) -> list[str]:
    wrong = []
    for text, target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        there = file.exists() and (not anchor or anchor in anchors(file))
        if not there or not text:
            wrong.append(target)
    return wrong


def test_links_to_missing_files_or_headings_and_links_without_text_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n\n[a](gone.md), [b](page.md#three), [c](#one-two), [](page.md), [d](https://e.f)\n")
    assert list(links(page)) == [("a", "gone.md"), ("b", "page.md#three"), ("c", "#one-two"), ("", "page.md")]
    assert anchors(page) == {"one-two"}
    assert wrong_links(page) == ["gone.md", "page.md#three", "page.md"]


def test_the_reference_lists_exactly_the_public_names() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\.\. auto\w+:: cacheblend_rag\.(\w+)$", page, flags=re.MULTILINE)) == sorted(
        cacheblend_rag.__all__
    )


def test_every_page_is_in_the_sites_index() -> None:
    listed = set()
    for page in (ROOT / "docs/index.md", ROOT / "docs/tutorial/index.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / name).resolve().relative_to(ROOT / "docs").as_posix() for name in names}
    written = {
        page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if ROOT / "docs" in page.parents
    }
    assert written - {"index"} == {name for name in listed if not name.startswith("generated/")}
    assert {f"generated/{notebook.stem}" for notebook in ROOT.glob("examples/*.ipynb")} <= listed


def test_the_documented_exit_codes_match_the_error_classes() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    codes = re.findall(r"^- \*\*(\d+)\*\*:(.*(?:\n  .*)*)", page, flags=re.MULTILINE)
    said = {name: int(code) for code, text in codes for name in re.findall(r"`(\w+Error)`", text)}
    assert said == {name: getattr(errors, name).exit_code for name in said}
    assert {"InputError", "StoreError", "ModelError", "ServerError"} <= said.keys()


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the `cacheblend` commands in a page's blocks, as a shell splits them."""
    for block in PARSER.parse(page.read_text(encoding="utf-8")):
        if block.type in {"code_block", "fence"}:
            lines = block.content.replace("\\\n", " ").splitlines()
            yield from (
                shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines if is_command(line)
            )


def is_command(line: str) -> bool:
    return re.match(r"\s*(\$ )?cacheblend [a-z]", line) is not None and "..." not in line and "|" not in line


@cache
def command_tree() -> Any:
    return get_command(app)


def unknown_words(command: list[str]) -> list[str]:
    """Return the subcommand or the options of a command that the command line does not know."""
    at, words = command_tree(), command[1:]
    while hasattr(at, "commands") and words:
        if words[0] not in at.commands:
            return words[:1]
        at, words = at.commands[words[0]], words[1:]
    # `serve` passes unknown options to vLLM.
    known = {option for parameter in at.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help",
        "-h",
    }
    return [word for word in words if word.startswith("-") and word not in known and command[1] != "serve"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_documented_command_and_option_exists(page: Path) -> None:
    assert [(command, wrong) for command in commands(page) if (wrong := unknown_words(command))] == []


def test_unknown_commands_and_options_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ cacheblend ask Who? --stor x\n```\n\n    cacheblend store lst\n    cacheblend store ls \\\n      --json\n"
    )
    assert [unknown_words(command) for command in commands(page)] == [["--stor"], ["lst"], []]


def test_every_reason_explained_in_the_docs_stands_in_the_code() -> None:
    page = (ROOT / "docs/howto/usage.md").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| (.*?) \|", page.partition("| reason |")[2], flags=re.MULTILINE)
    given = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "cacheblend_rag").rglob("*.py"))
    assert len(reasons) == 11
    # The code puts numbers and parts of text into the reasons.
    assert [part for reason in reasons for part in re.split(r"\d+|\.\.\.", reason) if part not in given] == []


def test_the_server_page_names_all_flags_of_serve() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`(--[^`]+)`", page.partition("Own flags:")[2].partition("The server listens")[0]))
    of_ours = {option for parameter in get_command(serve).params for option in parameter.opts} - {"--help", "-h"}
    assert said == of_ours - {"--write-back"} | {"--[no-]write-back"}


def test_the_page_about_traces_names_every_pass() -> None:
    page = (ROOT / "docs/howto/observe.md").read_text(encoding="utf-8")
    source = (ROOT / "cacheblend_rag/blending/fusor.py").read_text(encoding="utf-8")
    passes = re.findall(r'self\._run\(\s*"(\w+)"', source)
    assert len(passes) == 4
    assert [name for name in passes if f"cacheblend.{name}_pass " not in page] == []


def test_the_committed_figures_equal_the_scripts_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    draw = importlib.import_module("draw")
    monkeypatch.setattr(draw, "IMAGES", tmp_path)
    draw.main()
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 3
    for figure in drawn:
        assert figure.read_text("utf-8") == (ROOT / "docs/images" / figure.name).read_text("utf-8"), figure.name


def test_the_table_of_models_matches_the_tested_families() -> None:
    verdicts = {"BLENDED": "blended", "EXACT_PREFIX": "exact prefix", "NOT_BLENDED": "prefill"}
    source = (ROOT / "tests/blending/families.py").read_text(encoding="utf-8")
    in_vllm = "".join(
        (ROOT / f"tests/engines/vllm/test_{name}.py").read_text("utf-8")
        for name in ("parity", "families", "windows", "chunked_local")
    )
    covered = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            for case, made in zip(statement.value.keys, statement.value.values, strict=True):
                makers = re.findall(r"[\w.]+\(", ast.unparse(made))
                if (verdict := verdicts.get(ast.unparse(statement.target))) and case is not None:
                    covered[ast.literal_eval(case)] = verdict, *makers
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+`) \| (blended|exact prefix|prefill) \| (yes|no) \|$",
        (ROOT / "docs/models.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    shown = {case: (verdict, tested) for cases, verdict, tested in rows for case in re.findall(r"`([^`]+)`", cases)}
    assert {case: verdict for case, (verdict, _) in shown.items()} == {
        case: found[0] for case, found in covered.items()
    }
    for case, (verdict, tested) in shown.items():
        expected = verdict == "blended" and any(maker in in_vllm for maker in covered[case][1:])
        assert (tested == "yes") == expected, case
