"""Escapes foreign text that could control a terminal or forge a log line, and formats sizes."""

from __future__ import annotations

import re
import traceback
from logging import LogRecord

# C0 and C1 except tab and line break, DEL, line separators, marks that reorder the displayed text, lone surrogates.
_STEERING = re.compile(
    "\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
)
_BREAKING = re.compile("[\t\r\n]")
_HIDDEN = "<not logged>"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def printable(text: str) -> str:
    r"""Return ``text`` with terminal control characters escaped, as ``\u001b``. JSON decodes the escapes again."""
    return _STEERING.sub(_spelled, text)


def in_one_line(text: str) -> str:
    """Return ``text`` with control characters, tabs and line breaks escaped, to be shown as a name within a line."""
    return _BREAKING.sub(_spelled, printable(text))


def _spelled(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def hide_values(record: LogRecord) -> None:
    """Remove from a log record all values except numbers, and the message of an error; keep its class and traceback.

    The removed text may come from a user.
    """
    if record.exc_info and (error := record.exc_info[1]) is not None:
        if said := str(error):
            record.msg = str(record.msg).replace(said, _HIDDEN)
        record.exc_text = "".join([*traceback.format_tb(error.__traceback__), type(error).__qualname__])
        record.exc_info = None
    if isinstance(record.args, tuple):
        record.args = tuple(map(_number_or_hidden, record.args))
    elif record.args:
        record.args = {name: _number_or_hidden(value) for name, value in record.args.items()}


def _number_or_hidden(value: object) -> object:
    return value if isinstance(value, int | float) else _HIDDEN


def size(nbytes: float | None) -> str:
    """Return a number of bytes as text with a unit, as ``1.5 GiB``; ``-`` for None."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
