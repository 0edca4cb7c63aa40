"""The command line's root: options for every command, and errors as users see them."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from cacheblend_rag import __version__
from cacheblend_rag.errors import CacheBlendError

UNEXPECTED_EXIT_CODE = 70
"""A bug, in the words of sysexits.h: EX_SOFTWARE."""
INTERRUPTED_EXIT_CODE = 130
"""What a shell gives a command that Ctrl-C has ended."""


class _Group(TyperGroup):
    """Shows the library's own errors as they are, with their exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CacheBlendError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            typer.echo("\nStopped.", err=True)
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
        typer.echo(f"cacheblend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # The answer is what stdout is for, and libraries' chatter is nobody's answer. What a user has set stays.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning):
        typer.echo(f"Warning: {message}", err=True)
