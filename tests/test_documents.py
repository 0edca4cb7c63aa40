from __future__ import annotations

import os
from pathlib import Path

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

import cacheblend_rag.documents as documents
from cacheblend_rag.documents import Document, Skipped, content_digest, list_files, load_document
from cacheblend_rag.errors import InputError
from cacheblend_rag.html import html_to_text


def write_pdf(path: Path, pages: list[str], password: str | None = None) -> None:
    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        font = DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
            }
        )
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(content)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)


def loaded(path: Path) -> Document:
    document = load_document(path)
    assert isinstance(document, Document), document
    return document


def reason(path: Path) -> str:
    skipped = load_document(path)
    assert isinstance(skipped, Skipped)
    assert skipped.path == str(path.resolve())
    return skipped.reason


@pytest.mark.parametrize(
    "data",
    [
        b"One.\r\nTwo \xe2\x80\x93 three.\n",
        b"\xef\xbb\xbfOne.\nTwo \xe2\x80\x93 three.\n",
        "One.\nTwo – three.\n".encode("utf-16"),
    ],
)
def test_text_is_read_in_any_unicode_encoding_with_unix_newlines(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    document = loaded(tmp_path / "a.txt")
    assert document.text == "One.\nTwo – three.\n"
    assert document.metadata["source"] == document.path == str((tmp_path / "a.txt").resolve())


def test_markdown_stays_as_it_is(tmp_path: Path) -> None:
    text = "# Title\n\n* item `<b>`\n\n| a | b |\n"
    (tmp_path / "a.md").write_text(text)
    assert loaded(tmp_path / "a.md").text == text


def test_html_becomes_what_a_reader_sees(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<html><head><title>Logs</title><style>p{}</style></head><body><h1>The  <b>Logs</b></h1><p>Wind\nwest,<br>calm.</p>"
        "<!-- no --><ul><li>one</li><li><p>two</p></li></ul><script>no()</script>"
        "<table><tr><th>a</th><td>b</td></tr></table><pre>x = 1\n\n  y</pre>tail <i>end</i>.</body></html>"
    )
    document = loaded(tmp_path / "a.html")
    assert document.text == "# The Logs\n\nWind west,\ncalm.\n\n- one\n- two\n\na | b\n\nx = 1\n\n  y\n\ntail end."
    assert document.metadata["title"] == "Logs"


def test_html_takes_its_declared_encoding_and_keeps_a_title_the_page_does_not_show() -> None:
    text, title = html_to_text('<meta charset="iso-8859-1"><title>Caf\xe9</title><p>Na\xefve</p>'.encode("latin-1"))
    assert (text, title) == ("Café\n\nNaïve", "Café")


def test_deeply_nested_html_is_read() -> None:
    assert html_to_text("<div>" * 20_000 + "deep")[0] == "deep"


def test_pdf_pages_become_paragraphs(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", ["The harbour.", "The hill."])
    document = loaded(tmp_path / "a.pdf")
    assert document.text == "The harbour.\n\nThe hill."
    assert document.metadata["pages"] == 2


def test_pdfs_that_cannot_be_read_are_skipped_with_the_reason(tmp_path: Path) -> None:
    write_pdf(tmp_path / "locked.pdf", ["Secret."], password="x")
    write_pdf(tmp_path / "scan.pdf", ["", ""])
    write_pdf(tmp_path / "good.pdf", ["Fine."])
    (tmp_path / "cut.pdf").write_bytes((tmp_path / "good.pdf").read_bytes()[:200])
    (tmp_path / "junk.pdf").write_bytes(b"not a pdf at all")
    (tmp_path / "none.pdf").write_bytes(b"")
    assert "encrypted" in reason(tmp_path / "locked.pdf")
    assert "OCR" in reason(tmp_path / "scan.pdf")
    for name in ("cut", "junk", "none"):
        assert "broken PDF" in reason(tmp_path / f"{name}.pdf")


def test_any_damage_to_a_pdf_is_text_or_a_skip(tmp_path: Path) -> None:
    write_pdf(tmp_path / "good.pdf", ["The harbour.", "The hill."])
    data = bytearray((tmp_path / "good.pdf").read_bytes())
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x15
        (tmp_path / "bad.pdf").write_bytes(damaged)
        assert isinstance(load_document(tmp_path / "bad.pdf"), (Document, Skipped))


def test_text_that_is_none_is_skipped_with_the_reason(tmp_path: Path) -> None:
    cases = {
        "empty.txt": (b"", "empty"),
        "blank.md": (b" \n\t\n", "empty"),
        "empty.html": (b"<p></p>", "empty"),
        "image.txt": (b"\x89PNG\r\n\x1a\n\x00\x00", "binary"),
        "latin.txt": (b"caf\xe9 au lait", "not UTF-8 text (byte 3)"),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert expected in reason(tmp_path / name)
    empty = load_document(tmp_path / "empty.txt")
    latin = load_document(tmp_path / "latin.txt")
    assert isinstance(empty, Skipped) and empty.blank
    assert isinstance(latin, Skipped) and not latin.blank


def test_files_over_the_limit_are_skipped_without_being_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "big.html").open("wb") as file:
        file.truncate(documents.MAX_HTML_BYTES + 1)
    monkeypatch.setattr(documents, "html_to_text", lambda data: pytest.fail("parsed"))
    assert "over the limit of 32 MiB" in reason(tmp_path / "big.html")


def test_unreadable_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(documents, "content_digest", refuse)  # file modes do not stop root, who runs many CI jobs
    assert reason(tmp_path / "a.txt") == "cannot be read: Permission denied"


def test_a_file_that_vanishes_after_listing_is_skipped(tmp_path: Path) -> None:
    assert "cannot be read" in reason(tmp_path / "gone.txt")


def test_directories_are_walked_in_a_fixed_order_without_hidden_or_foreign_files(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.MD", "a.html", ".git/x.txt", "b/.hidden.txt", "b/pic.png", "c.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    listing = list_files([tmp_path])
    assert [str(f.relative_to(tmp_path.resolve())) for f in listing.files] == ["a.html", "c.pdf", "b/a.MD", "b/z.txt"]
    assert [Path(s.path).name for s in listing.skipped] == ["pic.png"]
    assert listing.directories == (tmp_path.resolve(),)


def test_each_file_is_listed_once_and_named_files_need_no_known_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "notes").write_text("Plain notes.")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    listing = list_files([tmp_path / "notes", tmp_path / "a.txt", tmp_path])
    assert [f.name for f in listing.files] == ["notes", "a.txt"]
    assert loaded(tmp_path / "notes").text == "Plain notes."


def test_directory_cycles_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    assert len(list_files([tmp_path]).files) == 1


def test_missing_paths_and_devices_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.txt cannot be read: No such file"):
        list_files([tmp_path / "nowhere.txt"])
    with pytest.raises(InputError, match="neither a file nor a directory"):
        list_files([os.devnull])


def test_the_digest_tells_contents_apart(tmp_path: Path) -> None:
    for name, data in (("a", b"x" * 3_000_000), ("b", b"x" * 3_000_000), ("c", b"x" * 2_999_999 + b"y")):
        (tmp_path / name).write_bytes(data)
    digests = [content_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
