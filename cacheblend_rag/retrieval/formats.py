"""Reads tables, JSON, Word and PowerPoint files as text; the extra `documents` has python-docx and python-pptx.

The functions raise UnusableFileError for a file that cannot be read, or whose package is not installed.
"""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO, StringIO
from pkgutil import resolve_name
from typing import Any

from cacheblend_rag.retrieval.extraction import UnusableFileError, decode, join_pages, titled

_MOST_UNPACKED = 512 << 20
_USUAL_UNPACKED, _MOST_TIMES = 64 << 20, 200
_HEADING = re.compile(r"Heading (\d)")


def word_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return a Word document's title and text, with headings, lists and tables in Markdown but no headers or footers."""
    document = _opened(data, "python-docx", "docx:Document", "Word document")
    return _paragraphs(_word_blocks(document)), titled(document, "core_properties.title")


def _word_blocks(document: Any) -> Iterator[tuple[str, bool]]:
    """Yield each block of text, and whether the block is a list item; no empty line stands between list items."""
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            yield _table(block), False
            continue
        text, style = block.text.strip(), getattr(block.style, "name", None) or ""
        level = 1 if style == "Title" else int(found[1]) if (found := _HEADING.match(style)) else 0
        in_list = style.startswith("List")
        if text:
            yield ("#" * min(level, 6) + " " if level else "- " if in_list else "") + text, in_list


def _table(table: Any) -> str:
    # A merged cell is listed once for each column that it spans.
    rows = (dict.fromkeys((cell._tc, " ".join(cell.text.split())) for cell in row.cells) for row in table.rows)
    return "\n".join(" | ".join(text for _, text in row) for row in rows if any(text for _, text in row))


def slides_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return a presentation's text, slide by slide with notes, and its title; ``page_starts`` has the slides as pages."""
    presentation = _opened(data, "python-pptx", "pptx:Presentation", "presentation")
    slides = {number: _slide(slide) for number, slide in enumerate(presentation.slides, 1)}
    text, starts = join_pages(slides)
    return text, {**titled(presentation, "core_properties.title"), "pages": len(slides), "page_starts": starts}


def _slide(slide: Any) -> str:
    title = slide.shapes.title
    blocks = [(f"# {' '.join(title.text.split())}", False)] if title is not None and title.text.strip() else []
    blocks += _shapes(shape for shape in slide.shapes if title is None or shape.shape_id != title.shape_id)
    if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
        blocks.append((frame.text, False))
    return _paragraphs(blocks)


def _shapes(shapes: Iterable[Any]) -> Iterator[tuple[str, bool]]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        elif getattr(shape, "has_table", False):
            rows = ([" ".join(cell.text.split()) for cell in row.cells] for row in shape.table.rows)
            yield "\n".join(" | ".join(row) for row in rows if any(row)), False
        elif shape.has_text_frame:
            yield "\n".join(paragraph.text for paragraph in shape.text_frame.paragraphs), False


def _paragraphs(blocks: Iterable[tuple[str, bool]]) -> str:
    """Join blocks with empty lines, but blocks that follow each other tightly with line ends."""
    parts: list[str] = []
    tight_before = False
    for text, tight in blocks:
        if clean := "\n".join(line.strip() for line in text.splitlines() if line.strip()):
            parts += ["\n" if tight and tight_before else "\n\n", clean]
            tight_before = tight
    return "".join(parts[1:])


def _opened(data: bytes, package: str, name: str, kind: str) -> Any:
    """Open a file with the reader that ``package`` has under ``name``."""
    try:
        reader = resolve_name(name)
    except ImportError as error:
        raise UnusableFileError(f"reading it needs {package}; pip install 'cacheblend-rag[documents]'") from error
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _MOST_UNPACKED:
            raise UnusableFileError(f"it unpacks to more than {_MOST_UNPACKED >> 20} MiB; split it")
        if unpacked > _USUAL_UNPACKED and unpacked > _MOST_TIMES * len(data):
            raise UnusableFileError(f"it unpacks to {unpacked // len(data)} times its size, as no document does")
        return reader(BytesIO(data))
    except (UnusableFileError, MemoryError):
        raise
    except Exception as error:  # the readers raise nearly any exception on broken files
        if data.startswith(b"\xd0\xcf\x11\xe0"):
            raise UnusableFileError(
                "it is encrypted, or in the format before 2007; save a copy without either"
            ) from error
        raise UnusableFileError(f"it is not a readable {kind} ({type(error).__name__}: {error})") from error


_DELIMITERS = ",;\t|"
_SAMPLE = 1 << 16
_LONGEST_FIELD = 1 << 24


def table_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the rows of a CSV or TSV file, one row a line with `` | `` between cells, the column names first.

    The metadata's ``head`` is the line of column names, or empty if the first row does not name the columns.
    """
    text = decode(data)
    try:
        csv.field_size_limit(_LONGEST_FIELD)
        table = csv.reader(StringIO(text, newline=""), delimiter=_delimiter(text), skipinitialspace=True)
        rows = [[" ".join(cell.split()) for cell in row] for row in table]
    except csv.Error as error:
        raise UnusableFileError(f"it is not a readable table ({error})") from error
    rows = [row for row in rows if any(row)]
    lines = [" | ".join(row) for row in rows]
    return "\n".join(lines), {"head": lines[0] if len(rows) > 1 and _is_head(rows[0]) else ""}


def _delimiter(text: str) -> str:
    # Only the sniffer's delimiter is used: the sniffer may take an apostrophe that begins a cell for a quote.
    try:
        return csv.Sniffer().sniff(text[:_SAMPLE], _DELIMITERS).delimiter
    except csv.Error:  # for example a table with one column
        return max(_DELIMITERS, key=text.partition("\n")[0].count)


def _is_head(row: Sequence[str]) -> bool:
    """Return whether a table's first row names the columns: every cell has a text of its own that is not a number."""
    return all(row) and len(set(row)) == len(row) and not any(_is_number(cell) for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def json_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return a JSON or JSON Lines document with a line for each value, so that chunks end between values."""
    text = decode(data).removeprefix("\ufeff")
    try:
        return _indented(json.loads(text)), {}
    except (ValueError, RecursionError) as whole:
        try:
            # splitlines() would also split at characters that may stand within a string.
            return "\n\n".join(_indented(json.loads(line)) for line in text.split("\n") if line.strip()), {}
        except (ValueError, RecursionError):
            raise UnusableFileError(f"it is not valid JSON ({whole})") from whole


def _indented(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
