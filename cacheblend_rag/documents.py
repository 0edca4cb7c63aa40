"""Read documents (txt, md, html, pdf) into text; what cannot be read is skipped with a reason, never half-read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from cacheblend_rag.errors import InputError
from cacheblend_rag.html import html_to_text

MAX_TEXT_BYTES = 256 << 20
MAX_PDF_BYTES = 512 << 20
MAX_HTML_BYTES = 32 << 20
"""A parsed HTML tree takes many times the size of its file."""

_BLOCK = 1 << 20
_READER_VERSION = b"1"  # part of every digest: raise it when the same bytes would now give another text


@dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        path: Absolute path.
        text: Its text, with Unix newlines.
        digest: Digest of the file's bytes; see :func:`content_digest`.
        metadata: ``source`` (the path), and ``title`` or ``pages`` where known.
    """

    path: str
    text: str
    digest: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why.

    Attributes:
        path: Absolute path.
        reason: In words, with what to do about it where something can be done.
        blank: The file is readable and holds no text: it is not merely out of reach for now.
    """

    path: str
    reason: str
    blank: bool = False


@dataclass(frozen=True)
class FileList:
    """What :func:`list_files` found: files in a fixed order, the directories asked for, and what was left out."""

    files: tuple[Path, ...]
    directories: tuple[Path, ...]
    skipped: tuple[Skipped, ...]


class _SkipError(Exception):
    def __init__(self, reason: str, blank: bool = False):
        super().__init__(reason)
        self.blank = blank


def list_files(paths: Iterable[str | Path]) -> FileList:
    """List files and, recursively, directories: sorted, each file once, hidden entries and linked directories left out.

    Files named on their own are taken whatever their suffix (unknown ones are read as plain text); in directories only those
    with a known suffix are.

    Raises:
        InputError: A path that does not exist or is neither file nor directory.
    """
    files: dict[Path, None] = {}
    directories: list[Path] = []
    skipped: list[Skipped] = []
    for given in paths:
        path = Path(given).expanduser()
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise InputError(f"{given} cannot be read: {error.strerror}.") from error
        path = path.resolve()
        if stat.S_ISDIR(mode):
            directories.append(path)
            for file in _walk(path, skipped):
                files.setdefault(file)
        elif stat.S_ISREG(mode):
            files.setdefault(path)
        else:
            raise InputError(f"{given} is neither a file nor a directory.")
    return FileList(tuple(files), tuple(directories), tuple(skipped))


def _walk(root: Path, skipped: list[Skipped]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        skipped.append(Skipped(str(error.filename), f"directory cannot be read: {error.strerror}"))

    for directory, children, names in os.walk(root, onerror=unreadable):
        children[:] = sorted(child for child in children if not child.startswith("."))
        for name in sorted(names):
            file = Path(directory, name)
            if name.startswith("."):
                continue
            if file.suffix.lower() in _READERS:
                yield file.resolve()
            else:
                skipped.append(Skipped(str(file), "not a txt, md, html or pdf file"))


def content_digest(path: Path) -> str:
    """Return a digest of a file's bytes, read block by block.

    Raises:
        OSError: The file cannot be read.
    """
    state = xxhash.xxh3_128(_READER_VERSION)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return str(state.hexdigest())


def load_document(path: str | Path) -> Document | Skipped:
    """Read one document; never raises for what is in the file."""
    path = Path(path).resolve()
    try:
        digest = content_digest(path)
        read, limit = _READERS.get(path.suffix.lower(), _PLAIN)
        size = path.stat().st_size
        if size > limit:
            raise _SkipError(f"{size >> 20} MiB is over the limit of {limit >> 20} MiB for such files; split it")
        text, metadata = read(path)
        if not text.strip():
            raise _SkipError("empty", blank=True)
    except _SkipError as skip:
        return Skipped(str(path), str(skip), skip.blank)
    except OSError as error:
        return Skipped(str(path), f"cannot be read: {error.strerror or error}")
    return Document(str(path), text, digest, {"source": str(path), **metadata})


def _read_text(path: Path) -> tuple[str, dict[str, Any]]:
    with path.open("rb") as file:
        head = file.read(_BLOCK)
    utf16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not utf16 and b"\0" in head:
        raise _SkipError("binary file")
    try:
        # Text mode decodes and translates newlines in one go: the file's bytes and its text, and no third copy.
        text = path.read_text(encoding="utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if utf16 else "UTF-8"
        raise _SkipError(f"not {kind} text (byte {error.start}); save it as UTF-8") from error
    if "\0" in text:
        raise _SkipError("binary file")
    return text, {}


def _read_html(path: Path) -> tuple[str, dict[str, Any]]:
    text, title = html_to_text(path.read_bytes())
    if "\0" in text:
        raise _SkipError("binary file")
    return text, {"title": title} if title else {}


def _read_pdf(path: Path) -> tuple[str, dict[str, Any]]:
    import pypdf
    from pypdf.errors import DependencyError

    try:
        with path.open("rb") as file:
            reader = pypdf.PdfReader(file)
            if reader.is_encrypted and not reader.decrypt(""):
                raise _SkipError("encrypted PDF; save a copy without a password")
            pages = [page.extract_text() for page in reader.pages]
    except (_SkipError, OSError):
        raise
    except DependencyError as error:
        raise _SkipError("encrypted PDF that needs the package `cryptography`; pip install cryptography") from error
    except Exception as error:  # pypdf lets many kinds through when a file is malformed
        raise _SkipError(f"broken PDF ({error})") from error
    text = "\n\n".join(page.strip() for page in pages).replace("\0", "")
    if not text.strip():
        raise _SkipError(f"PDF without text on its {len(pages)} pages (scanned?); run it through OCR first", blank=True)
    return text.encode("utf-8", "replace").decode("utf-8"), {"pages": len(pages)}


_Reader = Callable[[Path], tuple[str, dict[str, Any]]]
_PLAIN: tuple[_Reader, int] = (_read_text, MAX_TEXT_BYTES)
_READERS: dict[str, tuple[_Reader, int]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown"), _PLAIN),
    **dict.fromkeys((".html", ".htm", ".xhtml"), (_read_html, MAX_HTML_BYTES)),
    ".pdf": (_read_pdf, MAX_PDF_BYTES),
}
