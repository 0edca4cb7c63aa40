"""Makes foreign text fit for a terminal and a log, where it may steer one, or forge lines; and numbers fit for people."""

from __future__ import annotations

import re
import traceback
from logging import LogRecord

# C0 and C1 but tab and line break, DEL; separators of lines, marks that reorder what is shown; halves of a character.
_STEERING = re.compile(
    "\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
)
_BREAKING = re.compile("[\t\r\n]")
_HIDDEN = "<not logged>"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def printable(text: str) -> str:
    r"""Return ``text`` with what would steer a terminal spelled as ``\u001b``: the same text within JSON."""
    return _STEERING.sub(_spelled, text)


def in_one_line(text: str) -> str:
    """Do the same with tabs and line breaks, too: for a name within a line."""
    return _BREAKING.sub(_spelled, printable(text))


def _spelled(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def hide_values(record: LogRecord) -> None:
    """Take out of a log record what may be a user's text: all values but numbers, and what an error says; its kind stays."""
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
    """Return a number of bytes as people read it."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
