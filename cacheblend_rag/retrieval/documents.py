"""Finds document files and reads each file as text."""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.extraction import UnusableFileError, decode
from cacheblend_rag.retrieval.isolation import PARSER
from cacheblend_rag.retrieval.parsing import PARSERS

MAX_BYTES = 512 << 20
"""Size limit of a file in bytes. Larger files are skipped, because a document stays in memory while it is split."""

MAX_PARSED_BYTES = 16 << 20
"""Size limit of HTML, JSON and table files in bytes; the parsed form takes many times the memory of the file."""

_CODE = (
    ".bash .c .cc .cpp .cs .css .cu .cxx .erl .ex .exs .go .h .hpp .hs .hxx .java .jl .js .jsx .kt .lua .m .ml .mjs .php .pl "
    ".proto .ps1 .py .pyi .r .rb .rs .scala .sh .sql .swift .tf .ts .tsx .vue .zig .cfg .ini .toml .yaml .yml"
)
_PLAIN = frozenset((".txt", ".text", ".md", ".markdown", ".rst", *_CODE.split()))
_LARGE_IN_MEMORY = frozenset((".html", ".htm", ".csv", ".tsv", ".json", ".jsonl"))
SUFFIXES = _PLAIN | frozenset(PARSERS)
"""Suffixes of the supported file types, in lower case; the case of a file's suffix does not matter."""
KINDS = "txt, md, rst, html, pdf, docx, pptx, csv, tsv, json, jsonl and source code"
"""Supported file types in words."""

INDEX_FILE, REGISTERED_FILE, LOCK_FILE = "index.sqlite3", "registered.sqlite", "indexing.lock"
"""Names of a store's index (a directory with an index is a store), file of registered chunks, and indexing lock."""
_OF_STORES = frozenset((INDEX_FILE, f"{INDEX_FILE}.lock", f"{INDEX_FILE}-journal", REGISTERED_FILE, LOCK_FILE, "tiers"))

_LEADS_OUT = "it is a link out of the folder; name it, or the folder that it leads to, itself"


@dataclass(frozen=True)
class Document:
    """Holds the text of one file.

    Attributes:
        path: Absolute path of the file; identifies the document in an index.
        text: Text of the file, with newlines as line ends.
        digest: Hash of the file's bytes; equal digests mean equal files.
        metadata: ``source`` (the path) and, where known, ``title``, ``pages`` and ``unreadable_pages``. JSON values
            only.
        page_starts: Offset in the text and page number (from 1) of each page that has text. Empty without pages.
        head: Line of column names that begins a table's text; every chunk of the table begins with this line. Empty for
            a table without column names, None for a file that is not a table.
    """

    path: str
    text: str
    digest: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    page_starts: Sequence[tuple[int, int]] = ()
    head: str | None = None

    def pages(self, start: int, end: int) -> dict[str, int]:
        """Return the pages of a stretch of text: ``page``, and ``last_page`` if the stretch ends on a later page."""
        if not self.page_starts:
            return {}
        offsets = [offset for offset, _ in self.page_starts]
        first, last = (
            self.page_starts[max(0, bisect_right(offsets, at) - 1)][1] for at in (start, max(start, end - 1))
        )
        return {"page": first} if first == last else {"page": first, "last_page": last}


@dataclass(frozen=True)
class SkippedDocument:
    """Describes a file without usable text. Skipped files are values, not errors: one bad file never stops the others.

    Attributes:
        path: Absolute path of the file.
        reason: Reason in words for the user, with advice where something can be done.
        blank: True if the file was read and holds no text; False if the file could not be read, perhaps only for now.
    """

    path: str
    reason: str
    blank: bool = False


@dataclass(frozen=True)
class FoundDocuments:
    """Holds the files that a search has found.

    Attributes:
        roots: The files and directories that were searched, absolute.
        files: The files to load: absolute, each once, directories recursively in name order.
        skipped: The links that lead out of all ``roots``.
    """

    roots: tuple[Path, ...]
    files: tuple[Path, ...]
    skipped: tuple[SkippedDocument, ...]


def find_documents(
    paths: Iterable[Path | str], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> FoundDocuments:
    """Find the files to load.

    Inside a directory, the search leaves out hidden files and directories, links to directories, links that lead out of
    all given directories, and a store's index and KV; a path in ``paths`` is always included. Every other file is
    listed, whatever its type: :func:`load_document` reports why a file is skipped.

    Args:
        paths: Files and directories.
        include: Patterns for the files in a directory; only matching files are listed. A pattern without a slash is
            matched with the file's name (``*.md``), a pattern with a slash with the file's path below the directory
            (``guides/*``); ``*`` also matches slashes.
        exclude: Patterns; matching files are left out, and matching directories with their whole content.

    Raises:
        InputError: A path does not exist, or is empty.
    """
    given = list(paths)
    if "" in given:  # an empty path would stand for the current directory
        raise InputError("A path is empty: a variable that is not set? Write . for the current directory.")
    roots = [absolute(path) for path in given]
    missing = [str(root) for root in roots if _is_missing(root)]
    if missing:
        raise InputError(f"No such file or directory: {', '.join(missing)}. Check the spelling.")
    skipped: list[SkippedDocument] = []
    files = tuple(_walk(roots, include, exclude, skipped))
    return FoundDocuments(tuple(roots), files, tuple(skipped))


def _walk(
    roots: list[Path], include: Sequence[str], exclude: Sequence[str], skipped: list[SkippedDocument]
) -> Iterator[Path]:
    inside = [_real(root) for root in roots]
    seen: set[Path] = set()
    pending = [(root, root) for root in roots[::-1]]
    while pending:
        path, root = pending.pop()
        if path in seen or (path != root and _matches(path, root, exclude)):
            continue
        wanted = not include or path == root or _matches(path, root, include)
        if path != root and os.path.islink(path):  # noqa: PTH114 - Path.is_symlink() raises without permission
            leads_out = not any(_real(path).is_relative_to(each) for each in inside)
            if leads_out and wanted:
                skipped.append(SkippedDocument(str(path), _LEADS_OUT))
            if leads_out or is_directory(path):
                continue
        seen.add(path)
        entries = _visible(path) if is_directory(path) else None
        if entries is not None:
            pending.extend((entry, root) for entry in reversed(entries))
        elif wanted:
            yield path


def _matches(path: Path, root: Path, patterns: Sequence[str]) -> bool:
    below = path.relative_to(root).as_posix()
    return any(fnmatchcase(below if "/" in pattern else path.name, pattern.rstrip("/")) for pattern in patterns)


def _visible(directory: Path) -> list[Path] | None:
    """Return the entries of ``directory`` to visit, or None if it cannot be listed, so that it is reported like a file.

    A store's index and KV are left out: they are many files, and not documents.
    """
    try:
        with os.scandir(directory) as entries:
            kept = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError:
        return None
    if INDEX_FILE in kept:
        own = {"kv"} if os.path.isfile(directory / "kv/lock") else set()  # noqa: PTH113 - see is_directory
        kept = [name for name in kept if name not in _OF_STORES | own]
    return [directory / name for name in kept]


def file_digest(path: Path | str) -> str | None:
    """Return the digest that a :class:`Document` of a file would have, or None if the file cannot be read.

    The digest serves to skip unchanged files before parsing: ``file_digest(path) == index.digest_of(str(path))``.
    """
    try:
        path = absolute(path)
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()
    except OSError:
        return None


def load_document(path: Path | str) -> Document | SkippedDocument:
    """Load one file. A problem with the file is returned as the reason for skipping the file, never raised.

    Reasons are a type that is not in :data:`SUFFIXES`, a size above :data:`MAX_BYTES` (for some types
    :data:`MAX_PARSED_BYTES`), no content, binary content, text that is neither UTF-8, UTF-16 or UTF-32 with a byte
    order mark, nor mostly ASCII in Windows-1252, an encrypted or broken PDF, a PDF without text (a scan), parsing that
    takes more time or memory than :class:`~cacheblend_rag.retrieval.isolation.ParserLimits` allow, and access denied by
    the system.
    """
    path = absolute(path)
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        printable = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return SkippedDocument(printable, "its name is not valid UTF-8; rename it")
    try:
        data = _read(path)
        digest = xxhash.xxh3_128(data).hexdigest()
        suffix = path.suffix.lower()
        text, metadata = (decode(data), {}) if suffix in _PLAIN else PARSER.parse(suffix, data)
        text = text.encode("utf-8", "replace").decode()  # lone surrogates are not valid Unicode
        if not text.strip():
            raise UnusableFileError("it holds no text", blank=True)
    except UnusableFileError as error:
        return SkippedDocument(name, str(error), error.blank)
    except OSError as error:
        return SkippedDocument(name, f"it cannot be read: {error.strerror or error}")
    starts, head = metadata.pop("page_starts", ()), metadata.pop("head", None)
    return Document(name, text, digest, {"source": name, **metadata}, starts, head)


def absolute(path: Path | str) -> Path:
    """Return an absolute path without following links: a document is identified by the path that the user sees."""
    # Path.expanduser() raises for "~$a.docx", which names no home directory, and Path.absolute() keeps "..".
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # access is denied: loading the file reports the reason
        return False
    return False


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory; False if access is denied."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir() raises without permission


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() raises for circular links


def _read(path: Path) -> bytes:
    suffix = path.suffix.lower()
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        os.scandir(path).close()  # raises an OSError if the directory cannot be listed
        raise UnusableFileError("it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFileError("it is not a regular file")
    if suffix not in SUFFIXES:
        raise UnusableFileError(f"its type ({suffix or 'no suffix'}) is not among {KINDS}")
    limit = MAX_PARSED_BYTES if suffix in _LARGE_IN_MEMORY else MAX_BYTES
    if status.st_size > limit:
        advice = "convert it to text" if limit < MAX_BYTES else "split it"
        raise UnusableFileError(f"it is larger than {limit >> 20} MiB; {advice}")
    data = path.read_bytes()
    if not data:
        raise UnusableFileError("it is empty", blank=True)
    return data
