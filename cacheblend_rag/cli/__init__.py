"""The command line: a thin skin over the Python API. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys

import typer

from cacheblend_rag.cli import ask, chat, demo, doctor, documents, index, plan, serve, store, ui
from cacheblend_rag.console.app import UNEXPECTED_EXIT_CODE, app
from cacheblend_rag.lab.commands import bench, controller, eval, realm, sweeps, tune

__all__ = [
    "app",
    "ask",
    "bench",
    "chat",
    "controller",
    "demo",
    "doctor",
    "documents",
    "eval",
    "index",
    "main",
    "plan",
    "realm",
    "serve",
    "store",
    "sweeps",
    "tune",
    "ui",
]


def main() -> None:
    """Run the command line; never shows a traceback unless ``CACHEBLEND_DEBUG`` is set."""
    try:
        app(prog_name="cacheblend")
    except Exception as error:
        if os.environ.get("CACHEBLEND_DEBUG"):
            raise
        typer.echo(
            f"Error: unexpected {type(error).__name__}: {error}\nThis is a bug in cacheblend-rag. Run it again with "
            "CACHEBLEND_DEBUG=1 for the traceback, and report it.",
            err=True,
        )
        sys.exit(UNEXPECTED_EXIT_CODE)
