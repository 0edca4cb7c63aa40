"""Reads documents as text: which files there are, and what is in each."""

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
"""Larger files are skipped: a document is held in memory while it is cut."""

MAX_PARSED_BYTES = 16 << 20
"""The limit for HTML, JSON and tables, whose parsed form takes many times the memory of the file."""

_CODE = (
    ".bash .c .cc .cpp .cs .css .cu .cxx .erl .ex .exs .go .h .hpp .hs .hxx .java .jl .js .jsx .kt .lua .m .ml .mjs .php .pl "
    ".proto .ps1 .py .pyi .r .rb .rs .scala .sh .sql .swift .tf .ts .tsx .vue .zig .cfg .ini .toml .yaml .yml"
)
_PLAIN = frozenset((".txt", ".text", ".md", ".markdown", ".rst", *_CODE.split()))
_LARGE_IN_MEMORY = frozenset((".html", ".htm", ".csv", ".tsv", ".json", ".jsonl"))
SUFFIXES = _PLAIN | frozenset(PARSERS)
"""Types of files that are read, by suffix (in either case)."""
KINDS = "txt, md, rst, html, pdf, docx, pptx, csv, tsv, json, jsonl and source code"
"""The same in words."""

INDEX_FILE, REGISTERED_FILE, LOCK_FILE = "index.sqlite3", "registered.sqlite", "indexing.lock"
"""The names of a store's index, by which its directory is known, of what servers have registered, and of who indexes into it."""
_OF_STORES = frozenset((INDEX_FILE, f"{INDEX_FILE}.lock", f"{INDEX_FILE}-journal", REGISTERED_FILE, LOCK_FILE, "tiers"))

_LEADS_OUT = "it is a link out of the folder; name it, or the folder that it leads to, itself"


@dataclass(frozen=True)
class Document:
    """The text of one file.

    Attributes:
        path: Absolute path of the file; its identity in an index.
        text: The text, its lines ended by newlines.
        digest: Content hash of the file's bytes; equal digests mean that nothing changed.
        metadata: ``source`` (the path) and, where known, ``title``, ``pages`` and ``unreadable_pages``. JSON values only.
        page_starts: Where each page that has text begins: offset in the text, and the page's number from 1. Empty without pages.
        head: First line of a table's text, if it names the columns: every chunk of the table begins with it. Empty for a table
            without names, None for text that is no table.
    """

    path: str
    text: str
    digest: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    page_starts: Sequence[tuple[int, int]] = ()
    head: str | None = None

    def pages(self, start: int, end: int) -> dict[str, int]:
        """Return on which pages a stretch of the text stands: ``page``, and ``last_page`` where it is another one."""
        if not self.page_starts:
            return {}
        offsets = [offset for offset, _ in self.page_starts]
        first, last = (
            self.page_starts[max(0, bisect_right(offsets, at) - 1)][1] for at in (start, max(start, end - 1))
        )
        return {"page": first} if first == last else {"page": first, "last_page": last}


@dataclass(frozen=True)
class SkippedDocument:
    """A file that gave no text. A value, not an error: one bad file never stops the rest.

    Attributes:
        path: Absolute path of the file.
        reason: Why, in words for the user, and what to do where something can be done.
        blank: The file was read, and there is nothing in it: it is not merely out of reach for now.
    """

    path: str
    reason: str
    blank: bool = False


@dataclass(frozen=True)
class FoundDocuments:
    """The files that a search has found.

    Attributes:
        roots: The files and directories that were searched, absolute.
        files: The files to load: absolute, each once, directories recursively in name order.
        skipped: The links that lead out of all of ``roots``.
    """

    roots: tuple[Path, ...]
    files: tuple[Path, ...]
    skipped: tuple[SkippedDocument, ...]


def find_documents(
    paths: Iterable[Path | str], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> FoundDocuments:
    """Find the files to load.

    Hidden files and directories, links to directories, links that lead out of all given directories, and a store's index
    and KV are left out inside a directory; given themselves, they are taken. Every other file is listed, whatever its type:
    :func:`load_document` says why one is skipped.

    Args:
        paths: Files and directories.
        include: Patterns; of a directory's files only those that match one are listed. A pattern without a slash is matched with
            the file's name (``*.md``), one with a slash with its path below the directory (``guides/*``); ``*`` matches
            slashes, too.
        exclude: Patterns; what matches one is left out, directories with all that is in them.

    Raises:
        InputError: A path that does not exist, or is empty.
    """
    given = list(paths)
    if "" in given:  # it would be the current directory
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
        if path != root and os.path.islink(path):  # noqa: PTH114 - Path's own raise where looking is forbidden
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
    """Return what a walk visits in ``directory``; None where it cannot be listed, so that it is reported like a file.

    A store's index and KV are left out: they are nobody's documents, and many files.
    """
    try:
        with os.scandir(directory) as entries:
            kept = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError:
        return None
    if INDEX_FILE in kept:
        own = {"kv"} if os.path.isfile(directory / "kv/lock") else set()  # noqa: PTH113 - as is_directory
        kept = [name for name in kept if name not in _OF_STORES | own]
    return [directory / name for name in kept]


def file_digest(path: Path | str) -> str | None:
    """Return the digest a :class:`Document` of that file would have, or None where it cannot be read.

    For skipping unchanged files before they are parsed: ``file_digest(path) == index.digest_of(str(path))``.
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
    """Load one file. What is wrong with the file itself is returned as the reason it is skipped, never raised.

    Skipped are: types other than :data:`SUFFIXES`, files above :data:`MAX_BYTES` (some: :data:`MAX_PARSED_BYTES`), empty and
    binary files, text that is neither UTF-8, UTF-16 or UTF-32 with a byte order mark, nor mostly ASCII in Windows-1252,
    encrypted or broken PDFs, PDFs without text (scans), what takes more time or memory than
    :class:`~cacheblend_rag.retrieval.isolation.Limits` allow, and what the system does not let us read.
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
        text = text.encode("utf-8", "replace").decode()  # a format may spell half a character, which is no Unicode
        if not text.strip():
            raise UnusableFileError("it holds no text", blank=True)
    except UnusableFileError as error:
        return SkippedDocument(name, str(error), error.blank)
    except OSError as error:
        return SkippedDocument(name, f"it cannot be read: {error.strerror or error}")
    starts, head = metadata.pop("page_starts", ()), metadata.pop("head", None)
    return Document(name, text, digest, {"source": name, **metadata}, starts, head)


def absolute(path: Path | str) -> Path:
    """Make absolute without following links: a document is known by the name the user sees."""
    # Path.expanduser() raises for "~$a.docx", which is nobody's home, and Path.absolute() keeps "..".
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it cannot be looked at: to load it tells why
        return False
    return False


def is_directory(path: Path) -> bool:
    """Say whether that is a directory, as far as it may be looked at."""
    return os.path.isdir(path)  # noqa: PTH112 - Path's own raises where that is forbidden


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() raises for links in a circle


def _read(path: Path) -> bytes:
    suffix = path.suffix.lower()
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        os.scandir(path).close()  # raises why it could not be listed
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
