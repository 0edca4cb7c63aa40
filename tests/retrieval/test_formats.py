"""Tests that Word, PowerPoint, tables, JSON and source code become text."""

from __future__ import annotations

import csv
import re
import sys
import zipfile
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.retrieval.documents import Document, SkippedDocument, load_document
from cacheblend_rag.retrieval.extraction import UnusableFileError
from cacheblend_rag.retrieval.formats import json_text, slides_text, table_text, word_text


def loaded(path: Path) -> Document:
    document = load_document(path)
    assert isinstance(document, Document), document
    return document


def test_a_word_document_becomes_text_with_headings_lists_and_tables(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.core_properties.title = "Rules"
    document.add_heading("Travel", 1)
    document.add_paragraph("Above 500 euros the head approves.")
    for item in ("train", "ship"):
        document.add_paragraph(item, style="List Bullet")
    table = document.add_table(2, 3)
    for number, text in enumerate(("from", "to", "km", "Seldale", "Marlow", "12")):
        table.cell(number // 3, number % 3).text = text
    table.cell(0, 0).merge(table.cell(0, 1))
    document.add_paragraph("The end.")
    document.sections[0].footer.paragraphs[0].text = "page 1"
    document.save(tmp_path / "a.docx")
    found = loaded(tmp_path / "a.docx")
    assert found.text == (
        "# Travel\n\nAbove 500 euros the head approves.\n\n- train\n- ship\n\nfrom to | km\nSeldale | Marlow | 12\n\nThe end."
    )
    assert found.metadata["title"] == "Rules"


def test_a_presentation_is_read_slide_by_slide_with_notes_groups_and_tables(tmp_path: Path) -> None:
    pptx = pytest.importorskip("pptx")
    deck = pptx.Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[1])
    first.shapes.title.text = "Harbour"
    first.placeholders[1].text = "Two lights\nOne bell"
    first.notes_slide.notes_text_frame.text = "Speak slowly."
    deck.slides.add_slide(deck.slide_layouts[6])
    third = deck.slides.add_slide(deck.slide_layouts[6])
    group = third.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "Grouped"
    cells = third.shapes.add_table(1, 2, 0, 0, 9, 9).table
    cells.cell(0, 0).text, cells.cell(0, 1).text = "a", "b"
    deck.save(tmp_path / "a.pptx")
    found = loaded(tmp_path / "a.pptx")
    assert found.text == "# Harbour\n\nTwo lights\nOne bell\n\nSpeak slowly.\n\nGrouped\n\na | b"
    at = found.text.index("Grouped")
    assert found.pages(0, 9) == {"page": 1} and found.pages(at, at + 7) == {"page": 3} and found.metadata["pages"] == 3


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("junk.docx", b"not a zip", "not a readable Word document"),
        ("old.docx", b"\xd0\xcf\x11\xe0" + bytes(600), "format before 2007"),
        ("junk.pptx", b"PK\x03\x04", "not a readable presentation"),
    ],
)
def test_a_broken_office_file_is_skipped_with_the_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    pytest.importorskip(Path(name).suffix[1:])
    (tmp_path / name).write_bytes(data)
    document = load_document(tmp_path / name)
    assert isinstance(document, SkippedDocument) and reason in document.reason


@pytest.mark.parametrize(("read", "library"), [(word_text, "docx"), (slides_text, "pptx")])
def test_a_file_whose_library_is_missing_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, read: Any, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnusableFileError, match=rf"python-{library}; .*'cacheblend-rag\[documents\]'"):
        read(b"x")


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [(513 << 20, "unpacks to more than 512 MiB"), (100 << 20, "unpacks to 8[0-9]{2} times its size")],
)
def test_an_archive_that_unpacks_to_too_much_is_skipped(tmp_path: Path, claimed: int, reason: str) -> None:
    pytest.importorskip("docx")
    with zipfile.ZipFile(tmp_path / "bomb.docx", "w") as archive:
        archive.writestr("word/document.xml", bytes(120_000))
        archive.infolist()[0].file_size = claimed  # readers never unpack more than the declared size
    document = load_document(tmp_path / "bomb.docx")
    assert isinstance(document, SkippedDocument)
    assert re.search(reason, document.reason), document.reason


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_of_a_table_become_lines_under_the_names_of_its_columns(delimiter: str) -> None:
    rows = [["ship", "cargo", "built"], ["Proud Gull", "grain", "1889"], ["Ivory Anchor", "", "1901"]]
    text = "\n".join(delimiter.join(row) for row in rows)
    assert table_text(text.encode()) == (
        "ship | cargo | built\nProud Gull | grain | 1889\nIvory Anchor |  | 1901",
        {"head": "ship | cargo | built"},
    )


def test_a_table_with_quoted_cells_and_no_header_is_read() -> None:
    assert table_text(b'1,"two, with\nlines"\n3,four\n') == ("1 | two, with lines\n3 | four", {"head": ""})
    assert table_text(b"alone\n") == ("alone", {"head": ""})


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_an_apostrophe_in_a_table_is_no_quote(delimiter: str) -> None:
    rows = [["word", "note"], ["'tis", "it is"], ["'twas", "it was"], ["o'clock, noon", "of the 'clock'"]]
    table = StringIO()
    csv.writer(table, delimiter=delimiter).writerows(rows)
    assert table_text(table.getvalue().encode())[0] == "\n".join(map(" | ".join, rows))


def test_the_delimiter_of_a_table_is_found_despite_quotes_and_line_ends_in_cells() -> None:
    table = "price;desc;year\n3.5 'net';\"3.5 for\ntwo\";'new' 1999\n"
    assert table_text(table.encode())[0] == "price | desc | year\n3.5 'net' | 3.5 for two | 'new' 1999"


def test_rows_longer_than_the_header_lose_no_cell() -> None:
    assert table_text(b"a,b\n1,2,3\n")[0] == "a | b\n1 | 2 | 3"


def test_a_table_is_loaded_with_its_header_and_a_text_without_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ship,cargo\nGull,grain\n")
    (tmp_path / "a.txt").write_text("ship,cargo\nGull,grain\n")
    table = loaded(tmp_path / "a.csv")
    assert (table.head, "head" in table.metadata) == ("ship | cargo", False)
    assert loaded(tmp_path / "a.txt").head is None


def test_json_has_one_line_per_value_and_json_lines_one_paragraph_per_line() -> None:
    assert json_text('{"name":"Börre","ids":[1]}'.encode())[0] == '{\n "name": "Börre",\n "ids": [\n  1\n ]\n}'
    assert json_text(b'{"a":1}\n{"a":2}\n')[0] == '{\n "a": 1\n}\n\n{\n "a": 2\n}'


def test_a_line_of_json_may_contain_unicode_line_separators() -> None:
    text = '{"said": "one\u2028two"}\r\n{"said": "three\x85four"}\n' + '{"said": "nothing"}\n' * 9
    found, _ = json_text(text.encode())
    assert found.startswith('{\n "said": "one\u2028two"\n}\n\n{\n "said": "three\x85four"\n}\n\n')


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(rb'{"cut": "a \ud83d", "whole": "\ud83d\ude00"}')
    assert loaded(tmp_path / "a.json").text == '{\n "cut": "a ?",\n "whole": "\U0001f600"\n}'
    (tmp_path / "b.json").write_bytes(rb'"a \ude00"')
    assert loaded(tmp_path / "b.json").text == "a ?"


@pytest.mark.parametrize("name", ["a.py", "a.RS", "a.rst", "a.yaml"])
def test_source_code_and_rst_stay_unchanged(tmp_path: Path, name: str) -> None:
    text = "def f(x):\n    return x  # twice\n"
    (tmp_path / name).write_text(text)
    assert loaded(tmp_path / name).text == text
