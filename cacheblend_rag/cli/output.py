"""What commands print: JSON on stdout, tables for people, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

_SECONDS_A_LINE = 5.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(data: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as aligned columns: the first to the left, the others to the right; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float | None) -> str:
    """Return a number of bytes as people read it."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def seconds(value: float) -> str:
    """Return a time with the digits that matter."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, int, str], None]]:
    """Show on stderr how far the block is: a bar on a terminal, else a line every few seconds.

    Yields a function of how much is done, of how much, and what is at hand.
    """
    if not sys.stderr.isatty():
        yield _Lines(label)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, at: bar.update(task, completed=done, total=total, description=f"{label} {at}")


class _Lines:
    """Progress for a log: a line every few seconds, with the time that is left at the rate so far."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic):
        self._label, self._clock = label, clock
        self._said = clock()
        self._begin: tuple[int, float, float] | None = None  # of how much, and how much was done when

    def __call__(self, done: float, total: int, at: str) -> None:
        now = self._clock()
        if self._begin is None or self._begin[0] != total:
            self._begin = (total, done, now)
        if now - self._said < _SECONDS_A_LINE:
            return
        self._said = now
        _, done_then, then = self._begin
        left = (
            f", about {_minutes((total - done) * (now - then) / (done - done_then))} left" if done > done_then else ""
        )
        typer.echo(f"{self._label} {at}: {done:,.0f} of {total:,}{left}", err=True)


def _minutes(left: float) -> str:
    if left < 90:
        return f"{left:.0f} s"
    return f"{left / 60:.0f} min" if left < 5400 else f"{left / 3600:.1f} h"


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on stderr, if that is a terminal; yields a function that changes the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(label) as shown:
        yield lambda text: shown.update(f"{label}: {text}")
