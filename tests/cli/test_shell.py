"""Tests exit codes, completion and colours of the command line, and that each option has one meaning."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner, Result

import cacheblend_rag.cli
from cacheblend_rag import errors
from cacheblend_rag.cli import app
from cacheblend_rag.console import output

Run = Callable[..., Result]


def commands(group: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    for key, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{key} ")
        else:
            yield f"{name}{key}", command


def test_no_word_of_a_help_text_is_taken_for_markup() -> None:
    for name, command in commands():
        for text in (
            command.help,
            *(part for each in command.params for part in (getattr(each, "help", ""), each.metavar)),
        ):
            assert Text.from_markup(text or "").plain == (text or ""), name


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("cacheblend_rag.rag.inventory.Inventory.__init__", fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CacheBlendError("x"), 1),
        (errors.InputError("x"), 2),
        (errors.PromptTooLongError("x"), 2),
        (errors.UnknownChunkError("x"), 2),
        (errors.StoreError("x"), 3),
        (errors.StoreMismatchError("x"), 3),
        (errors.ModelError("x"), 4),
        (errors.ServerError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_kind_of_error_has_its_exit_code_and_no_traceback(run: Run, monkeypatch, error, code):
    failing(monkeypatch, error)
    result = run("store", "ls")
    assert result.exit_code == code
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert str(code) in exit_codes()


@cache
def exit_codes() -> str:
    """Return the help's part about exit codes."""
    return CliRunner().invoke(app, ["--help"]).stdout.split("Exit codes:")[1]


def test_a_bug_is_exit_code_70(monkeypatch, capsys):
    failing(monkeypatch, ZeroDivisionError("boom"))
    monkeypatch.delenv("CACHEBLEND_DEBUG", raising=False)
    monkeypatch.setattr("sys.argv", ["cacheblend", "store", "ls"])
    with pytest.raises(SystemExit) as ended:
        cacheblend_rag.cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (70, "")
    assert "unexpected ZeroDivisionError: boom" in said.err and "This is a bug in cacheblend-rag" in said.err
    assert "Traceback" not in said.err


def test_an_error_of_the_operating_system_is_not_reported_as_a_bug(monkeypatch, capsys):
    failing(monkeypatch, PermissionError(13, "Permission denied", "/root/store"))
    monkeypatch.delenv("CACHEBLEND_DEBUG", raising=False)
    monkeypatch.setattr("sys.argv", ["cacheblend", "store", "ls"])
    with pytest.raises(SystemExit) as ended:
        cacheblend_rag.cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "Error: [Errno 13] Permission denied: '/root/store'\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_characters_outside_the_terminals_encoding_are_shown_as_escapes(monkeypatch, as_json):
    said = "Müller “–” 🙂"

    def say(*_: object, **__: object) -> None:
        output.print_json(said) if as_json else output.echo(said)

    monkeypatch.setattr("cacheblend_rag.cli.store.open_inventory", say)
    result = CliRunner(charset="latin-1").invoke(app, ["store", "evict", "--to", "0"])
    shown = result.stdout_bytes.decode("latin-1").strip()
    assert shown == (
        '"M\\u00fcller \\u201c\\u2013\\u201d \\ud83d\\ude42"' if as_json else "Müller \\u201c\\u2013\\u201d \\U0001f642"
    )


def test_a_mistyped_flag_is_exit_code_2(run: Run):
    assert run("store", "ls", "--no-such-flag").exit_code == 2


def test_the_shell_completes_commands_and_options():
    for words, wanted in (
        ("cacheblend ind", "index"),
        ("cacheblend documents r", "rm"),
        ("cacheblend ask --rat", "--ratio"),
    ):
        env = {"_CACHEBLEND_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert CliRunner().invoke(app, [], env=env, prog_name="cacheblend").stdout.split() == [wanted]


def test_completion_can_be_installed(run: Run):
    assert "--install-completion" in run("--help").stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "coloured"), [("NO_COLOR", False), ("SOME_COLOR", True)])
def test_no_color_is_respected(monkeypatch, variable, coloured):
    for name, value in (("TERM", "xterm-256color"), ("COLORTERM", ""), (variable, "1"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with output.progress("Indexing") as show:
        show(1, 2, "a.txt")
    colours = re.findall(r"\x1b\[[0-9;]*(?:3[0-9]|38;5;\d+)m", terminal.getvalue())
    assert bool(colours) == coloured and "Indexing a.txt" in terminal.getvalue()


def test_every_command_that_prints_a_result_takes_json():
    without = {name for name, command in commands() if not any("--json" in option.opts for option in command.params)}
    assert without == {"chat", "serve", "ui"}


def test_an_option_has_one_help_text_in_every_command():
    """Each option has one definition: the help of two commands may not drift apart. This test lists intended differences."""
    # Some options have different defaults; evaluations draw, write or change different things; doctor measures a store beside
    # the model; chunks belong to a prompt or to a store; documents and questions are measured, tuned on, or learned from.
    own = {"--seed", "--out", "--output", "--ratio", "--store", "--chunks", "--chunk-tokens", "--max-tokens"}
    own |= {"--documents", "--questions"}
    helps: dict[str, set[str]] = {}
    for name, command in commands():
        if name.startswith(("bench", "realm")) or name == "serve":
            continue  # benchmarks, the training of a BERT and vLLM have different options
        for option in command.params:
            if option.param_type_name == "option":
                helps.setdefault(option.opts[0], set()).add(option.help or "")
    assert {name for name, found in helps.items() if len(found) > 1} - own == set()
    assert len(helps["--model"]) == len(helps["--engine"]) == len(helps["--k"]) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("documents", "ls", "--store"),
        ("index", __file__, "--model"),
        ("index", __file__, "--model", "bundled", "--writer"),
        ("index", __file__, "--embedding"),
        ("index", __file__, "--encrypt"),
        ("store", "keygen"),
    ],
)
def test_the_home_of_a_missing_user_is_an_input_error(run: Run, command: tuple[str, ...]):
    result = run(*command, "~nobody-at-all/x")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "there is no user nobody-at-all" in result.stderr


def test_a_missing_home_directory_is_an_error_that_names_home(run: Run, monkeypatch):
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)  # a container's user may have no entry in passwd
    for name in ("CACHEBLEND_HOME", "HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for command in (("documents", "ls"), ("documents", "ls", "-s", "~/store")):
        result = run(*command)
        assert result.exit_code == 2, result.output
        assert "HOME" in result.stderr


def test_a_command_of_the_lab_without_the_lab_names_the_package_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.cli._PLUGINS", "a group without entry points")
    done = run("eval", "--help")
    assert done.exit_code == 2
    assert done.stderr == "Error: `cacheblend eval` comes with cacheblend-lab: pip install cacheblend-lab\n"
