"""Extracts the text from the bytes of a file; a file without usable text raises UnusableFileError."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from bs4.element import Tag

_log = logging.getLogger(__name__)
# Silence pypdf, whose messages do not name the file and precede our own message, unless the user has set a level.
if logging.getLogger("pypdf").level == logging.NOTSET:
    logging.getLogger("pypdf").setLevel(logging.CRITICAL + 1)

_BOMS = (  # UTF-32 first, because its little-endian mark begins with the mark of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SAMPLE = 1 << 20

_BLOCKS = frozenset(
    (  # noqa: SIM905 - a list of forty quoted words reads worse
        "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure footer "
        "form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu nav ol p pre search section summary table tbody "
        "tfoot thead tr ul"
    ).split()
)
_TIGHT = frozenset({"li", "tr", "dt", "dd"})
"""Blocks that follow a block of the same name without an empty line."""
_CELLS = frozenset({"td", "th"})
_PREFIXES = {"li": "- ", **{f"h{level}": "#" * level + " " for level in range(1, 7)}}
# Elements that belong to the site, and not to the page: every page of the site would hold the same text.
_DROPPED = ("title", "noscript", "svg", "iframe", "nav", "footer", "script", "style", "template")
_SPACES = re.compile(r"\s+")


class UnusableFileError(Exception):
    """Reports a file without usable text; the message completes the sentence "NAME was skipped: ...".

    Attributes:
        blank: Whether the file was read and holds no text.
    """

    def __init__(self, reason: str, blank: bool = False):
        super().__init__(reason)
        self.blank = blank


def decode(data: bytes, declared: str | None = None) -> str:
    """Decode text by its byte order mark, else as UTF-8, ``declared`` or Windows-1252; line ends become newlines.

    Raises:
        UnusableFileError: The data are binary, or the encoding cannot be determined with confidence.
    """
    marked = next((name for mark, name in _BOMS if data.startswith(mark)), None)
    for encoding in [marked] if marked else ["utf-8", *([declared] if declared else [])]:
        try:
            return _checked(data.decode(encoding))
        except (UnicodeError, LookupError):
            continue
    if marked:
        raise UnusableFileError(f"it begins like {marked} but is not valid; save it as UTF-8")
    # Nearly any bytes decode as Windows-1252, so only text that is mostly ASCII is accepted.
    text = _checked(data.decode("cp1252", "replace"))
    sample = text[:_SAMPLE]
    if "\ufffd" in text or len(_NOT_ASCII.findall(sample)) > 0.3 * len(sample):
        raise UnusableFileError("its text encoding is unknown; save it as UTF-8")
    return text


def _checked(text: str) -> str:
    sample = text[:_SAMPLE]
    if "\0" in text or len(_CONTROL.findall(sample)) > 0.01 * len(sample):
        raise UnusableFileError("it is binary (or UTF-16 without a byte order mark), not text")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def html_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the visible text of an HTML page, and its title as metadata.

    Headings and list items become Markdown headings and list items; an empty line separates blocks. Scripts, styles,
    navigation and footers are dropped.
    """
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    markup = decode(data, EncodingDetector.find_declared_encoding(data, is_html=True))
    soup = BeautifulSoup(markup, "html.parser")
    title = soup.title.get_text() if soup.title else ""
    for element in soup.find_all(_DROPPED):
        element.extract()
    lines = "".join(_pieces(soup)).split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    title = _SPACES.sub(" ", title).strip()
    return text, {"title": title} if title else {}


def _pieces(soup: BeautifulSoup) -> Iterator[str]:
    """Yield the visible text with line breaks at block edges, in time linear in the page size, whatever the nesting."""
    from bs4.element import CData, NavigableString, Tag

    owners: dict[int, Tag] = {id(soup): soup}  # the nearest block around each element
    started: set[int] = set()
    block: Tag | None = None
    at_space = True
    for node in soup.descendants:
        owner = owners[id(node.parent)]
        if isinstance(node, Tag):
            owners[id(node)] = node if node.name in _BLOCKS else owner
            if node.name == "br" and owner is block:
                at_space = True
                yield "\n"
            elif node.name in _CELLS and owner is block:
                at_space = True
                yield " | "
            continue
        if type(node) not in (NavigableString, CData):  # skips subclasses: comments, scripts and styles
            continue
        text = str(node) if owner.name == "pre" else _SPACES.sub(" ", str(node))
        if owner is not block:
            if not text.strip():
                continue
            if block is not None:
                yield "\n" if owner.name == block.name and owner.name in _TIGHT else "\n\n"
            if id(owner) not in started:
                yield _PREFIXES.get(owner.name, "")
            started.add(id(owner))
            block, at_space = owner, True
        if at_space and owner.name != "pre":
            text = text.lstrip()
        if text:
            at_space = text[-1].isspace()
            yield text


def pdf_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of all pages, separated by empty lines, and metadata with the title and the number of pages.

    The metadata's ``page_starts`` lists the offset in the text and the number of each page. Pages that cannot be read
    are left out, logged as warnings, and listed in ``unreadable_pages``.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnusableFileError("it is encrypted; save a copy without a password")
        count = len(reader.pages)
    except (DependencyError, FileNotDecryptedError) as error:
        raise UnusableFileError("it is encrypted; save a copy without a password") from error
    except (UnusableFileError, MemoryError):
        raise
    except Exception as error:  # pypdf raises nearly any exception on broken files
        raise UnusableFileError(f"it is not a readable PDF ({type(error).__name__}: {error})") from error
    pages: dict[int, str] = {}
    unreadable: list[int] = []
    for number in range(count):
        try:
            pages[number + 1] = reader.pages[number].extract_text().replace("\0", "")
        except MemoryError:
            raise
        except Exception as error:
            _log.warning("page %d cannot be read: %s: %s", number + 1, type(error).__name__, error)
            unreadable.append(number + 1)
    text, starts = join_pages(pages)
    if not text and unreadable:
        raise UnusableFileError(f"it is not a readable PDF (pages {', '.join(map(str, unreadable))} cannot be read)")
    if not text:
        raise UnusableFileError("its pages hold no text (a scan?); run text recognition on it first", blank=True)
    return text, titled(reader, "metadata.title") | {"pages": count, "page_starts": starts} | (
        {"unreadable_pages": unreadable} if unreadable else {}
    )


def join_pages(pages: Mapping[int, str]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of numbered pages, separated by empty lines, and offset and number of each page with text."""
    starts: list[tuple[int, int]] = []
    parts: list[str] = []
    offset = 0
    for number, page in pages.items():
        if body := page.strip():
            starts.append((offset, number))
            parts.append(body)
            offset += len(body) + 2
    return "\n\n".join(parts), starts


def titled(document: Any, where: str) -> dict[str, Any]:
    """Return the title that a document has at the attribute path ``where``, as metadata; empty if reading it fails."""
    try:
        title = attrgetter(where)(document)
    except Exception:
        return {}
    return {"title": title.strip()} if isinstance(title, str) and title.strip() else {}
