"""Reads tables and JSON as text."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from typing import Any

from cacheblend_rag.retrieval.extraction import UnusableFileError, decode

_DELIMITERS = ",;\t|"
_SAMPLE = 1 << 16
_LONGEST_FIELD = 1 << 24


def table_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return a CSV or TSV file's rows, a line each, every value behind the name of its column: a chunk holds rows, not the head.

    Raises:
        UnusableFileError: See :func:`decode`; or it is no table.
    """
    text = decode(data)
    try:
        csv.field_size_limit(_LONGEST_FIELD)
        rows = [
            [" ".join(cell.split()) for cell in row] for row in csv.reader(StringIO(text, newline=""), _dialect(text))
        ]
    except csv.Error as error:
        raise UnusableFileError(f"it is not a readable table ({error})") from error
    rows = [row for row in rows if any(row)]
    if not rows:
        return "", {}
    if len(rows) > 1 and _is_head(rows[0]):
        return "\n".join(_named(rows[0], row) for row in rows[1:]), {}
    return "\n".join(" | ".join(row) for row in rows), {}


def _dialect(text: str) -> type[csv.Dialect]:
    try:
        return csv.Sniffer().sniff(text[:_SAMPLE], _DELIMITERS)
    except csv.Error:
        return csv.excel  # one column, for one


def _is_head(row: Sequence[str]) -> bool:
    """Say whether a table's first row names its columns: words, each once."""
    return all(row) and len(set(row)) == len(row) and not any(_is_number(cell) for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def _named(head: Sequence[str], row: Sequence[str]) -> str:
    names = [*head, *("" for _ in row[len(head) :])]
    return ", ".join(f"{name}: {cell}" if name else cell for name, cell in zip(names, row, strict=False) if cell)


def json_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return a JSON document, or one a line (JSON lines), with a line for each value, so that chunks end between values.

    Raises:
        UnusableFileError: See :func:`decode`; or it is not JSON.
    """
    text = decode(data).removeprefix("\ufeff")
    try:
        return _indented(json.loads(text)), {}
    except (ValueError, RecursionError) as whole:
        try:
            return "\n\n".join(_indented(json.loads(line)) for line in text.splitlines() if line.strip()), {}
        except (ValueError, RecursionError):
            raise UnusableFileError(f"it is not valid JSON ({whole})") from whole


def _indented(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
