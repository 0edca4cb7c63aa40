"""Finding a data set's file under the user's directory, and reading its rows whatever their container."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cacheblend_rag.errors import InputError
from cacheblend_rag.evaluation.samples import Skipped

ENVIRONMENT = "CACHEBLEND_DATA"

# Where the files of a data set usually are, most specific first; globs below the directory, or in a folder of that name.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "musique": ("musique.json*", "musique*dev*.json*", "musique*.json*", "*.json*"),
    "2wikimqa": ("2wikimqa*.json*", "wikihop*.json*", "dev.json*", "*dev*.json*", "train.json*"),
    "hotpotqa": ("hotpotqa*.json*", "hotpot_dev*.json*", "hotpot*.json*", "*dev*.json*"),
    "samsum": ("samsum*.json*", "test.json*", "val*.json*", "*.json*"),
    "multi_news": ("multi_news*.json*", "*.json*"),
}
_FOLDERS: dict[str, tuple[str, ...]] = {
    "musique": ("musique",),
    "2wikimqa": ("2wikimqa", "2wikimultihopqa", "2WikiMultihopQA"),
    "hotpotqa": ("hotpotqa", "hotpot_qa"),
    "samsum": ("samsum",),
    "multi_news": ("multi_news", "multi_news_longbench", "multinews"),
}
NAMED = tuple(_PATTERNS)


def find_file(name: str, data: Path | None) -> Path:
    """Return the file of the data set ``name``.

    Args:
        name: One of :data:`NAMED`.
        data: The file itself, or a directory that holds it, at its top or in a folder of the data set's name; None takes
            the environment's ``CACHEBLEND_DATA``.

    Raises:
        InputError: No directory is given, or it holds no such file.
    """
    root = data or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if root is None:
        raise InputError(
            f"{name} is not part of this package. Point to your copy with --data DIR or {ENVIRONMENT}=DIR: a directory with "
            f"the file, or with a folder {_FOLDERS[name][0]}/."
        )
    root = root.expanduser()
    if root.is_file():
        return root
    if not root.is_dir():
        raise InputError(f"There is no file or directory {root}.")
    for folder in (*(root / f for f in _FOLDERS[name]), root):
        # At the top, names that fit any file would take another data set's.
        patterns = [p for p in _PATTERNS[name] if folder != root or name.split("_", maxsplit=1)[0] in p]
        for pattern in patterns:
            found = sorted(f for f in folder.glob(pattern) if f.is_file() and "corpus" not in f.name)
            if found:
                return found[0]
    raise InputError(
        f"No file of {name} in {root}; looked for {', '.join(_PATTERNS[name])} in {', '.join(_FOLDERS[name])} and for "
        "names with the data set's own at the top. Give the file itself with --data FILE."
    )


@dataclass(frozen=True)
class RowsFile:
    """A file as it was read.

    Attributes:
        rows: Its rows, each with where it stands.
        skipped: What is no row.
        digest: Hash of the bytes that were read.
    """

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
    """Return rows with where they stand; instead of a line that is no JSON stands what is wrong with it."""
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
    # Not splitlines: U+2028 and the like stand inside JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"line {number}", json.loads(line)))
            except ValueError as error:
                rows.append((f"line {number}", error))
    return rows
