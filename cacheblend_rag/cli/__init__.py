"""Runs the command line, a thin layer over the Python API. A command's module is imported only when the command runs."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pkgutil import resolve_name
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from cacheblend_rag import __version__
from cacheblend_rag.console.output import LogLines, echo
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.store import plugins

UNEXPECTED_EXIT_CODE = 70
"""Exit code for a bug: EX_SOFTWARE of sysexits.h."""
INTERRUPTED_EXIT_CODE = 130
"""Exit code that shells give a command ended by Ctrl-C."""

_PLUGINS = "cacheblend_rag.commands"
COMMANDS = {
    "ask": "cacheblend_rag.cli.ask:ask",
    "chat": "cacheblend_rag.cli.ask:chat",
    "doctor": "cacheblend_rag.cli.doctor:doctor",
    "documents": "cacheblend_rag.cli.documents:documents",
    "index": "cacheblend_rag.cli.index:index",
    "models": "cacheblend_rag.cli.models:models",
    "serve": "cacheblend_rag.cli.serve:serve",
    "store": "cacheblend_rag.cli.store:store",
    "ui": "cacheblend_rag.cli.ui:ui",
}
"""Module and attribute that define each command."""
_OF_THE_LAB = frozenset(("bench", "demo", "eval", "figures", "learn", "marginal", "realm", "tune-retriever"))


class Commands(Mapping[str, Any]):
    """Finds commands by name, in a table of their places and among the entry points of other packages."""

    def __init__(self, table: Mapping[str, str], group: str = ""):
        self._table, self._group = table, group

    def __getitem__(self, name: str) -> Any:
        if name in self._table:
            found = resolve_name(self._table[name])
        elif name in plugins.names(self._group):
            found = plugins.load(self._group, name, "command", lambda command: command)
        else:
            raise KeyError(name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        yield from self._table
        yield from sorted(plugins.names(self._group) - self._table.keys())

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Group(TyperGroup):
    """Prints the library's own errors as messages, and exits with their exit code."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: Any = Commands(COMMANDS, _PLUGINS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _OF_THE_LAB and not ctx.resilient_parsing:
            raise InputError(f"`cacheblend {cmd_name}` comes with cacheblend-lab: pip install cacheblend-lab")
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CacheBlendError as error:
            echo(f"Error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            echo("\nStopped.", err=True)
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Answer questions over your documents with a faster first token: reuse every chunk's KV cache, recompute the few "
    "tokens that matter.",
    epilog="Exit codes: 0 done, 1 another error, 2 a file, flag or argument that cannot be used, 3 the store, 4 the model, "
    f"5 the server, {UNEXPECTED_EXIT_CODE} a bug, {INTERRUPTED_EXIT_CODE} Ctrl-C.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"cacheblend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # Other libraries' messages would disturb the output. Variables that the user has set stay.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # PyTorch asks for huge pages: a model's weights are written into new memory three times as fast.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # OpenMP's threads spin while they wait. A long spin on a core that another process needs, too, delays all threads.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # As on stderr: an answer may contain characters that a terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    tell_warnings()


def tell_warnings() -> None:
    """Print warnings and log lines like all other messages of commands on stderr."""
    warnings.showwarning = _show_warning
    logging.lastResort = LogLines(logging.WARNING)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning):
        echo(f"Warning: {message}", err=True)


def main() -> None:
    """Run the command line; show no traceback unless ``CACHEBLEND_DEBUG`` is set."""
    try:
        app(prog_name="cacheblend")
    except Exception as error:
        if os.environ.get("CACHEBLEND_DEBUG"):
            raise
        # Errors of the system: a full disk, a name that is too long, a missing permission.
        if isinstance(error, OSError | CacheBlendError):
            echo(f"Error: {error}", err=True)
            sys.exit(getattr(error, "exit_code", CacheBlendError.exit_code))
        echo(
            f"Error: unexpected {type(error).__name__}: {error}\nThis is a bug in cacheblend-rag. Run it again with "
            "CACHEBLEND_DEBUG=1 for the traceback, and report it.",
            err=True,
        )
        sys.exit(UNEXPECTED_EXIT_CODE)
