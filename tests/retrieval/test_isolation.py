"""Files that would take all time and memory, or crash their reader, are skipped, and the next file is read."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from cacheblend_rag.retrieval import isolation
from cacheblend_rag.retrieval.documents import Document, SkippedDocument, load_document
from cacheblend_rag.retrieval.extraction import UnusableFileError
from cacheblend_rag.retrieval.isolation import Parser, ParserLimits

MIB = 1 << 20
SMALL = ParserLimits(cpu_s=1, cpu_s_per_mib=0, memory=384 * MIB, memory_per_byte=0)
GOOD = b"<title>t</title><p>fine"


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    opened = Parser(SMALL)
    yield opened
    opened.close()


def refused(parser: Parser, suffix: str, data: bytes) -> str:
    with pytest.raises(UnusableFileError) as error:
        parser.parse(suffix, data)
    assert parser.parse(".html", GOOD) == ("fine", {"title": "t"}), "the next file is read"
    return str(error.value)


def office(name: str, content: bytes, **more: bytes) -> bytes:
    """Pack a Word document with that text, without python-docx, so that its size costs the test nothing."""
    kinds = "http://schemas.openxmlformats.org"
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{kinds}/package/2006/content-types"><Default Extension="rels" ContentType='
            f'"application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/{name}" ContentType="{main}"/>'
            "</Types>",
        )
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{kinds}/package/2006/relationships"><Relationship Id="a" Target="{name}" Type='
            f'"{kinds}/officeDocument/2006/relationships/officeDocument"/></Relationships>',
        )
        archive.writestr(name, content)
        for each, data in more.items():
            archive.writestr(each, data)
    return packed.getvalue()


def word(paragraphs: bytes) -> bytes:
    space = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    return b'<w:document xmlns:w="' + space + b'"><w:body>' + paragraphs + b"</w:body></w:document>"


def pdf(stream: bytes) -> bytes:
    """Make a PDF of one page whose content is ``stream``, compressed."""
    packed = zlib.compress(stream, 9)
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources<</Font<</F<</Type/Font/Subtype/Type1"
        b"/BaseFont/Helvetica>>>>>>>>",
        b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(packed), packed),
    ]
    body, starts = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        starts.append(b"%010d 00000 n \n" % len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"xref\n0 5\n0000000000 65535 f \n" + b"".join(starts)
    return body + table + b"trailer<</Root 1 0 R/Size 5>>\nstartxref\n%d\n%%%%EOF" % len(body)


@pytest.mark.slow
def test_a_pdf_page_with_endless_drawing_is_stopped(parser: Parser) -> None:
    assert parser.parse(".pdf", pdf(b"BT /F 9 Tf (harbour) Tj ET"))[0] == "harbour"
    bomb = pdf(b"BT /F 9 Tf (a) Tj ET\n" * 300_000)
    assert len(bomb) < MIB
    assert "reading it takes more than" in refused(parser, ".pdf", bomb)


@pytest.mark.slow
def test_a_word_document_that_unpacks_to_millions_of_paragraphs_is_stopped(parser: Parser) -> None:
    pytest.importorskip("docx")
    text = b"<w:p><w:r><w:t>a</w:t></w:r></w:p>"
    assert parser.parse(".docx", office("word/document.xml", word(text)))[0] == "a"
    bomb = office("word/document.xml", word(text * 150_000))
    assert len(bomb) < MIB
    assert "reading it takes more than" in refused(parser, ".docx", bomb)


def test_a_document_with_multiplying_entities_is_not_expanded(parser: Parser) -> None:
    pytest.importorskip("docx")
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<!DOCTYPE d [<!ENTITY e0 "boom">{entities}]>'.encode() + word(b"<w:p><w:r><w:t>&e9;</w:t></w:r></w:p>")
    data = office("word/document.xml", bomb)
    try:
        assert len(parser.parse(".docx", data)[0]) < 1000
    except UnusableFileError as error:
        assert str(error)
    assert parser.parse(".html", GOOD)[0] == "fine"


@pytest.mark.slow
def test_nested_json_whose_indentation_would_fill_the_memory_is_stopped(parser: Parser) -> None:
    depth = 900
    bomb = b"[" * depth + b",".join([b"1"] * 1_000_000) + b"]" * depth
    assert "reading it takes more than" in refused(parser, ".json", bomb)


def test_a_long_line_of_column_names_is_not_repeated_in_the_text_of_a_table(parser: Parser) -> None:
    bomb = b"n" * MIB + b",b\n" + b"1,2\n" * 2000
    assert len(parser.parse(".csv", bomb)[0]) < 2 * len(bomb)


@pytest.mark.slow
def test_html_with_a_million_open_tags_is_stopped(parser: Parser) -> None:
    bomb = b"<div><b>" * 500_000 + b"deep"
    assert "reading it takes more than" in refused(parser, ".html", bomb)


@pytest.mark.slow
def test_the_time_limit_applies_to_each_file_separately(parser: Parser) -> None:
    page = b"<p>word " * 10_000
    for _ in range(6):
        assert parser.parse(".html", page)[0].count("word") == 10_000
    assert parser._process.poll() is None


def test_one_reader_process_reads_many_files(parser: Parser) -> None:
    parser.parse(".html", GOOD)
    process = parser._process
    for number in range(20):
        assert parser.parse(".csv", f"name,age\nAda,{number}\n".encode())[0] == f"name | age\nAda | {number}"
    assert parser._process is process


def test_a_hanging_reader_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_started", lambda: _running("import time; time.sleep(600)"))
    parser = Parser(ParserLimits(cpu_s=1, cpu_s_per_mib=0, wall_factor=0.2))
    with pytest.raises(UnusableFileError, match="takes more than 1 s"):
        parser.parse(".html", GOOD)
    parser.close()


def test_a_crashing_reader_loses_only_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started, parser = isolation._started, Parser(SMALL)
    monkeypatch.setattr("cacheblend_rag.retrieval.documents.PARSER", parser)
    for name in ("a", "b"):
        (tmp_path / f"{name}.html").write_bytes(GOOD)
    monkeypatch.setattr(isolation, "_started", lambda: _running("import os; os.abort()"))
    crashed = load_document(tmp_path / "a.html")
    assert isinstance(crashed, SkippedDocument)
    assert not crashed.blank
    assert "its reader crashed on it (exit code -6)" in crashed.reason
    monkeypatch.setattr(isolation, "_started", started)
    assert isinstance(load_document(tmp_path / "b.html"), Document)
    parser.close()


def test_a_file_whose_text_is_too_long_is_refused() -> None:
    parser = Parser(ParserLimits(answer=1000))
    with pytest.raises(UnusableFileError, match="its text is larger"):
        parser.parse(".html", b"<p>" + b"long " * 1000)
    assert parser.parse(".html", GOOD)[0] == "fine"
    parser.close()


def test_the_reader_process_has_no_secrets_and_writes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEBLEND_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with Path("/proc/self/status").open() as file:  # the reader does not inherit an open file
        parser = Parser(SMALL)
        parser.parse(".html", GOOD)
        process = Path(f"/proc/{parser._process.pid}")
        if not process.exists():
            pytest.skip("there is no /proc")
        assert b"secret" not in (process / "environ").read_bytes()
        assert os.path.realpath(process / "cwd") == "/"
        limits = (process / "limits").read_text()
        assert any(line.split()[:5] == ["Max", "file", "size", "0", "0"] for line in limits.splitlines())
        opened = [os.path.realpath(each) for each in (process / "fd").iterdir()]
        assert not any(each.endswith("status") for each in opened)
        assert file.readable()
    parser.close()


def test_warnings_of_the_reader_are_logged(caplog: pytest.LogCaptureFixture, parser: Parser) -> None:
    reply = {"text": "t", "metadata": {}, "warnings": ["page 2 cannot be read"]}
    stand_in = Parser(SMALL)
    stand_in._process, stand_in._owner = (
        _running(f"import sys; sys.stdin.readline(); print({json.dumps(reply)!r})"),
        os.getpid(),
    )
    assert stand_in.parse(".html", GOOD) == ("t", {})
    assert "page 2 cannot be read" in caplog.text
    stand_in.close()


def _running(program: str):
    import subprocess
    import sys

    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
