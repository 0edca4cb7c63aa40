"""Prints the output of commands: JSON or tables on stdout, progress on stderr. All output of commands goes through here."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from cacheblend_rag.printable import in_one_line, printable
from cacheblend_rag.printable import size as size  # noqa: PLC0414 - commands import all output functions from here

Show = Callable[[float, int, str], None]
"""Callback with the amount done, the total, and the current item."""

_SECONDS_A_LINE = 5.0


_hearing: list[Callable[[str], object]] = []


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text on stdout or stderr, with terminal control characters escaped."""
    if err and _hearing:
        _hearing[-1](text)
    else:
        typer.echo(printable(text), err=err, nl=nl)


@contextmanager
def heard_by(hear: Callable[[str], object]) -> Iterator[None]:
    """Pass each line that any thread would print on stderr to ``hear`` while the block runs."""
    _hearing.append(hear)
    try:
        yield
    finally:
        _hearing.pop()


class LogLines(logging.Handler):
    """Prints log lines on stderr, as Python does without any logging configuration."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record as a line."""
        echo(self.format(record), err=True)


def counted(number: int, thing: str) -> str:
    """Return a number of things in words: "1 chunk", "2 chunks"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def print_json(data: Any) -> None:
    """Print one JSON document on stdout."""
    unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    echo(json.dumps(data, indent=2, ensure_ascii=not unicode, default=str))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in aligned columns: the first left-aligned, the others right-aligned. The first row is the heading."""
    rows = [list(map(in_one_line, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def seconds(value: float) -> str:
    """Return a time as text, in milliseconds below one second, else in seconds."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def duration(value: float | None) -> str:
    """Return an estimated time as text in seconds, minutes or hours; a dash for None."""
    if value is None:
        return "-"
    if value < 90:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


@contextmanager
def progress(label: str) -> Iterator[Show]:
    """Show the progress of the block on stderr: a bar on a terminal, else a line every few seconds.

    Yields a :data:`Show` function.
    """
    if not sys.stderr.isatty():
        lines = _Lines(label)
        with _written(lines.line):
            yield lines
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
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, at: bar.update(
            task, completed=done, total=total, description=f"{label} {in_one_line(at)}"
        )


def by_steps(show: Show, total: int, what: str) -> Callable[[int], None]:
    """Return a function that takes the amount done since its last call, and shows the amount done in all."""
    done = 0

    def step(more: int) -> None:
        nonlocal done
        done += more
        show(done, total, what)

    return step


class _Lines:
    """Shows progress in a log: a line every few seconds, even without progress, with the time left at the rate so far."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic):
        self._label, self._clock = label, clock
        self._at: tuple[float, int, str] | None = None
        self._begin: tuple[int, float, float] | None = None  # total, and amount and time of the first call

    def __call__(self, done: float, total: int, at: str) -> None:
        if self._begin is None or self._begin[0] != total:
            self._begin = (total, done, self._clock())
        self._at = (done, total, in_one_line(at))

    def line(self) -> str | None:
        """Return the progress in words; None before the first call."""
        if self._at is None or self._begin is None:
            return None
        done, total, at = self._at
        _, done_then, then = self._begin
        line = f"{self._label} {at}: {done:,.0f} of {total:,}"
        if done == done_then:
            return line
        return f"{line}, about {duration((total - done) * (self._clock() - then) / (done - done_then))} left"


def _write_until(over: threading.Event, line: Callable[[], str | None]) -> None:
    """Print the text that ``line`` returns, if any, on stderr every few seconds until ``over`` is set."""
    while not over.wait(_SECONDS_A_LINE):
        if (text := line()) is not None:
            echo(text, err=True)


@contextmanager
def _written(line: Callable[[], str | None]) -> Iterator[None]:
    """Print the text that ``line`` returns every few seconds while the block runs."""
    over = threading.Event()
    thread = threading.Thread(target=_write_until, args=(over, line), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """Show the current activity on stderr: a status on a terminal, else a line every few seconds if the text has changed.

    Yields a function that changes the text.
    """
    if not sys.stderr.isatty():
        texts: list[str] = []
        with _written(lambda: _last(label, texts)):
            yield texts.append
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(label)) as shown:
        yield lambda text: shown.update(Text(f"{label}: {in_one_line(text)}"))


def _last(label: str, texts: list[str]) -> str | None:
    """Return the newest text with the label, and clear ``texts``; None if there is no text."""
    newest = None
    while texts:
        newest = texts.pop(0)
    return None if newest is None else f"{label}: {newest}"
