"""Reads the rows of a JSON file in any container, and reports lines that are no rows."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cacheblend_rag.errors import InputError


@dataclass(frozen=True)
class Skipped:
    """Holds a row that cannot be used."""

    file: str
    where: str
    why: str

    def __str__(self) -> str:
        """Return file, place and reason in one line."""
        return f"{self.file}, {self.where}: {self.why}"


@dataclass(frozen=True)
class RowsFile:
    """Holds the contents of a file."""

    rows: list[tuple[str, dict[str, Any]]]
    skipped: list[Skipped]
    digest: str


def hash_file(file: Path) -> str:
    """Return the hash of a file's bytes, as ``xxh3_128:`` and hex digits.

    Raises:
        InputError: The file cannot be read.
    """
    return _hash(_read_bytes(file))


def read_rows(file: Path) -> RowsFile:
    """Return the rows of a JSON array, a JSON object of rows, or JSON lines (gzipped or not).

    Raises:
        InputError: The file cannot be read.
    """
    raw = _read_bytes(file)
    try:
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InputError(f"{file} cannot be read: {error}.") from error
    found = RowsFile([], [], _hash(raw))
    for where, row in _parse(text):
        if isinstance(row, dict):
            found.rows.append((where, row))
        else:
            why = f"this is no JSON ({row})" if isinstance(row, ValueError) else _no_object(row)
            found.skipped.append(Skipped(file.name, where, why))
    if not found.rows and not found.skipped:
        raise InputError(f"{file} holds no rows.")
    return found


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error}.") from error


def _hash(raw: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}"


def _no_object(row: Any) -> str:
    return f"expected a JSON object, found {type(row).__name__}"


def _parse(text: str) -> list[tuple[str, Any]]:
    """Return rows with their places; a line that is no JSON is represented by its ValueError."""
    try:
        whole = json.loads(text)
    except ValueError:
        return _parse_lines(text)
    if isinstance(whole, list):
        return [(f"row {i}", row) for i, row in enumerate(whole, 1)]
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        return [(f"row {i}", row) for i, row in enumerate(whole["data"], 1)]
    if isinstance(whole, dict) and whole and all(isinstance(row, dict) for row in whole.values()):
        return [(f"row {key}", row) for key, row in whole.items()]
    return [("line 1", whole)]


def _parse_lines(text: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    # str.splitlines would split at U+2028 and similar characters inside JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"line {number}", json.loads(line)))
            except ValueError as error:
                rows.append((f"line {number}", error))
    return rows
