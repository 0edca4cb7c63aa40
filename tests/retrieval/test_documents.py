from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pypdf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval import documents
from cacheblend_rag.retrieval.documents import Document, SkippedDocument, file_digest, find_documents, load_document
from cacheblend_rag.retrieval.extraction import UnusableFileError, decode, html_text, pdf_text
from cacheblend_rag.retrieval.formats import json_text, slides_text, table_text, word_text


def write_pdf(path: Path, pages: list[str], password: str | None = None) -> None:
    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        face = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
        fonts = DictionaryObject({NameObject("/F1"): face})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(content)
    writer.add_metadata({"/Title": "Harbour book"})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)


def loaded(path: Path) -> Document:
    document = load_document(path)
    assert isinstance(document, Document), document
    return document


def skipped(path: Path) -> SkippedDocument:
    document = load_document(path)
    assert isinstance(document, SkippedDocument), document
    assert document.path == str(path)
    return document


@pytest.mark.parametrize(
    "data",
    [
        "One.\r\nTwo – three.\r".encode(),
        b"\xef\xbb\xbfOne.\nTwo \xe2\x80\x93 three.\n",
        "One.\nTwo – three.\n".encode("utf-16"),
        b"\xfe\xff" + "One.\nTwo – three.\n".encode("utf-16-be"),
        "One.\nTwo – three.\n".encode("utf-32"),
        "One.\nTwo – three.\n".encode("cp1252"),
    ],
)
def test_text_is_read_in_the_usual_encodings_with_unix_newlines(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    document = loaded(path)
    assert document.text == "One.\nTwo – three.\n"
    assert document.metadata["source"] == document.path == str(path)
    assert document.digest == file_digest(path) == file_digest(str(path))


def test_markdown_stays_unchanged(tmp_path: Path) -> None:
    text = "# Title\n\n* item `<b>`\n\n| a | b |\n"
    (tmp_path / "a.MD").write_text(text)
    assert loaded(tmp_path / "a.MD").text == text


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_unicode_text_survives(text: str) -> None:
    assert decode(text.encode("utf-8-sig")) == decode(text.encode("utf-16")) == text


@given(st.binary(max_size=400))
def test_all_bytes_decode_to_text_or_raise_an_error_with_a_reason(data: bytes) -> None:
    for read in (decode, html_text, pdf_text, word_text, slides_text, table_text, json_text):
        try:
            read(data)
        except UnusableFileError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("name", "data", "reason", "blank"),
    [
        ("empty.txt", b"", "empty", True),
        ("blank.md", b" \n\t\n", "no text", True),
        ("empty.html", b"<p></p><script>x()</script>", "no text", True),
        ("image.txt", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "binary", False),
        ("controls.txt", b"a\x01\x02b" * 40, "binary", False),
        ("unmarked.txt", "wide text".encode("utf-16-le"), "without a byte order mark", False),
        ("cut.txt", b"\xff\xfeA\x00B", "begins like utf-16 but is not valid", False),
        ("russian.txt", "Маяк на холме".encode("koi8-r"), "encoding is unknown; save it as UTF-8", False),
        ("japanese.txt", "港の上の灯台".encode("shift-jis"), "encoding is unknown; save it as UTF-8", False),
        ("picture.png", b"x", "its type (.png) is not among txt, md, ", False),
        ("Makefile", b"all:", "no suffix", False),
        ("broken.json", b'{"a": ', "not valid JSON", False),
        ("empty.csv", b"\n,,\n", "no text", True),
        ("junk.pdf", b"not a pdf at all", "not a readable PDF", False),
        ("empty.pdf", b"", "empty", True),
    ],
)
def test_a_file_without_text_is_skipped_with_the_reason(
    tmp_path: Path, name: str, data: bytes, reason: str, blank: bool
) -> None:
    (tmp_path / name).write_bytes(data)
    document = skipped(tmp_path / name)
    assert reason in document.reason and document.blank is blank


def test_html_becomes_the_visible_text(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<html><head><title>The\n Logs</title><style>p{}</style></head><body><h1>The  <b>Logs</b></h1><p>Wind\nwest,<br>"
        "calm&nbsp;sea.</p><!-- no --><div>a<p>b</p>c</div><ul><li>one</li>\n<li>two<ul><li>three</ul></ul>"
        "<script>no()</script><table><tr><th>a</th><td></td><td>b</td></tr>\n<tr><td>1<td>2</table>"
        "<pre>x = 1\n\n  y</pre>tail <i>end</i>.</body></html>"
    )
    document = loaded(tmp_path / "a.html")
    assert document.text == (
        "# The Logs\n\nWind west,\ncalm sea.\n\na\n\nb\n\nc\n\n- one\n- two\n- three\n\n"
        "a |  | b\n1 | 2\n\nx = 1\n\n  y\n\ntail end."
    )
    assert document.metadata["title"] == "The Logs"


def test_html_with_an_unclosed_head_or_with_forms_loses_no_text() -> None:
    page = b"<head><title>T</title><body>Seen.<form><button>Press</button><select><option>Pick</select></form>"
    text, metadata = html_text(page)
    assert all(word in text for word in ("Seen.", "Press", "Pick")) and metadata == {"title": "T"}


def test_navigation_and_footers_of_a_web_page_are_left_out() -> None:
    page = (
        b"<nav><ul><li>Home</ul></nav><header>Harbour news</header><main><p>The light is out.<script>track()</script></main>"
        b"<style>p{}</style><template>later</template><footer><p>All rights reserved</footer>"
    )
    assert html_text(page)[0] == "Harbour news\n\nThe light is out."


def test_html_is_decoded_by_its_declared_encoding() -> None:
    page = '<meta charset="koi8-r"><p>Маяк</p>'.encode("koi8-r")
    assert html_text(page)[0] == "Маяк"
    assert html_text("<meta charset='latin-1'><p>Маяк</p>".encode())[0] == "Маяк"  # it is UTF-8 anyway


@pytest.mark.slow
def test_deeply_nested_html_is_read() -> None:
    assert html_text(b"<div><b>" * 5_000 + b"deep")[0] == "deep"


def test_pdf_pages_become_paragraphs(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", ["The harbour.", "", "The hill."])
    document = loaded(tmp_path / "a.pdf")
    assert document.text == "The harbour.\n\nThe hill."
    assert document.metadata["pages"] == 3 and document.metadata["title"] == "Harbour book"
    hill = document.text.index("The hill")
    assert document.pages(0, 5) == {"page": 1} and document.pages(hill, hill + 8) == {"page": 3}
    assert document.pages(0, len(document.text)) == {"page": 1, "last_page": 3}


def test_pdfs_without_readable_text_are_skipped_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pdf(tmp_path / "locked.pdf", ["Secret."], password="x")
    write_pdf(tmp_path / "scan.pdf", ["", ""])
    write_pdf(tmp_path / "good.pdf", ["Fine."])
    (tmp_path / "cut.pdf").write_bytes((tmp_path / "good.pdf").read_bytes()[:200])
    assert "encrypted" in skipped(tmp_path / "locked.pdf").reason
    assert "scan" in skipped(tmp_path / "scan.pdf").reason and skipped(tmp_path / "scan.pdf").blank
    assert "not a readable PDF" in skipped(tmp_path / "cut.pdf").reason
    assert not [record for record in caplog.records if record.name.startswith("pypdf")], (
        "our message says it, with the name"
    )


def test_an_unreadable_page_does_not_lose_the_rest_of_a_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pdf(tmp_path / "a.pdf", ["The harbour.", "The hill."])
    real = pypdf.PageObject.extract_text

    def failing(self: pypdf.PageObject) -> str:
        text = real(self)
        if "hill" in text:
            raise KeyError("/Font")
        return text

    monkeypatch.setattr(pypdf.PageObject, "extract_text", failing)
    data = (tmp_path / "a.pdf").read_bytes()
    text, metadata = pdf_text(data)
    assert text == "The harbour." and metadata["unreadable_pages"] == [2]
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda self: 1 / 0)
    with pytest.raises(UnusableFileError, match="not a readable PDF") as failed:
        pdf_text(data)
    assert not failed.value.blank


def test_a_damaged_pdf_gives_text_or_is_skipped(tmp_path: Path) -> None:
    write_pdf(tmp_path / "good.pdf", ["The harbour.", "The hill."])
    data = (tmp_path / "good.pdf").read_bytes()
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x15
        (tmp_path / "bad.pdf").write_bytes(damaged)
        assert isinstance(load_document(tmp_path / "bad.pdf"), (Document, SkippedDocument))


def test_files_over_the_limit_are_skipped_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read"))
    for name, limit in (("big.html", documents.MAX_PARSED_BYTES), ("big.txt", documents.MAX_BYTES)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(limit + 1)
        assert f"larger than {limit >> 20} MiB" in skipped(tmp_path / name).reason


@pytest.mark.slow
def test_a_hundred_megabytes_of_text_are_read(tmp_path: Path) -> None:
    line = b"The wind was north-west and the sea was calm all day long.\n"
    (tmp_path / "big.txt").write_bytes(line * (100_000_000 // len(line) + 1))
    assert len(loaded(tmp_path / "big.txt").text) > 100_000_000


def test_unreadable_and_irregular_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "not a regular file" in skipped(tmp_path / "pipe.txt").reason
    assert "No such file" in skipped(tmp_path / "gone.txt").reason
    assert file_digest(tmp_path / "pipe.txt") is file_digest(tmp_path / "gone.txt") is None
    assert "directory" in skipped(tmp_path).reason

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # file modes do not stop root, which runs many CI jobs
    denied = skipped(tmp_path / "a.txt")
    assert denied.reason == "it cannot be read: Permission denied" and not denied.blank


def test_a_file_name_that_is_not_unicode_is_skipped(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9.txt"))
    path.write_text("x")
    document = load_document(find_documents([tmp_path]).files[0])
    assert isinstance(document, SkippedDocument) and "rename it" in document.reason
    document.path.encode()


def test_directories_are_walked_in_name_order_without_hidden_entries(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.MD", "a.html", ".git/x.txt", "b/.hidden.txt", "b/pic.png", "c.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [str(path.relative_to(tmp_path)) for path in find_documents([tmp_path]).files]
    assert found == ["a.html", "b/a.MD", "b/pic.png", "b/z.txt", "c.pdf"]


def test_each_file_is_listed_once_and_hidden_files_only_if_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / ".note.txt").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    assert list(find_documents(["a.txt", tmp_path, "../" + tmp_path.name, ".note.txt"]).files) == [
        tmp_path / "a.txt",
        tmp_path / ".note.txt",
    ]


def test_a_directory_that_cannot_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.txt").write_text("x")
    real = os.scandir

    def refusing(path: Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert list(find_documents([tmp_path]).files) == [tmp_path / "closed", tmp_path / "open.txt"]
    assert skipped(tmp_path / "closed").reason == "it cannot be read: Permission denied"


def test_inaccessible_files_are_skipped_and_accessible_ones_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("closed/a.txt", "open.txt"):
        (tmp_path / name).write_text("x")

    def forbidding(look: Any) -> Any:
        def refusing(path: Any, *args: Any, **named: Any) -> Any:
            if "closed/" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return look(path, *args, **named)

        return refusing

    for name in ("stat", "lstat"):  # simulates a directory that may be listed and not entered; modes do not stop root
        monkeypatch.setattr(os, name, forbidding(getattr(os, name)))
    closed, long = tmp_path / "closed/a.txt", tmp_path / ("l" * 300)
    assert list(find_documents([tmp_path]).files) == [closed, tmp_path / "open.txt"]
    assert list(find_documents([closed, long]).files) == [closed, long]
    assert skipped(closed).reason == "it cannot be read: Permission denied"
    assert skipped(long).reason == "it cannot be read: File name too long"


def test_a_missing_path_is_an_input_error_before_anything_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=r"No such file or directory: .*nowhere\.txt, .*gone"):
        find_documents([tmp_path / "a.txt", tmp_path / "nowhere.txt", tmp_path / "gone"])


def test_a_file_name_that_begins_with_a_tilde_is_no_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~$a.txt").write_text("x")  # Office names its lock files so
    assert loaded(Path("~$a.txt")).path == str(tmp_path / "~$a.txt")
    assert find_documents(["~$a.txt"]).files == (tmp_path / "~$a.txt",)


def listed(root: Path, **patterns: list[str]) -> list[str]:
    return [path.relative_to(root).as_posix() for path in find_documents([root], **patterns).files]


def test_patterns_select_files_of_a_directory(tmp_path: Path) -> None:
    for name in ("a.md", "b.txt", "old/c.md", "old/deep/d.md", "lib/node_modules/e.md", "lib/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert listed(tmp_path, include=["*.txt"]) == ["b.txt", "lib/f.txt"]
    assert listed(tmp_path, include=["old/*"]) == ["old/c.md", "old/deep/d.md"]
    assert listed(tmp_path, exclude=["node_modules", "old/"]) == ["a.md", "b.txt", "lib/f.txt"]
    assert listed(tmp_path, include=["*.md"], exclude=["old/deep/*", "node_modules"]) == ["a.md", "old/c.md"]
    assert list(find_documents([tmp_path / "b.txt"], ["*.md"], ["b*"]).files) == [
        tmp_path / "b.txt"
    ]  # a named file is always included


def test_the_digest_differs_between_contents(tmp_path: Path) -> None:
    for name, data in (("a", b"x" * 3_000_000), ("b", b"x" * 3_000_000), ("c", b"x" * 2_999_999 + b"y")):
        (tmp_path / name).write_bytes(data)
    digests = [file_digest(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_a_link_out_of_the_folder_is_skipped_with_a_reason_and_a_link_within_is_read(tmp_path: Path) -> None:
    outside, folder, other = tmp_path / "outside", tmp_path / "folder", tmp_path / "other"
    for directory in (outside, folder, other):
        directory.mkdir()
        (directory / "text.txt").write_text(directory.name)
    (folder / "within.txt").symlink_to("text.txt")
    (folder / "given too.txt").symlink_to(other / "text.txt")
    (folder / "secret.txt").symlink_to(outside / "text.txt")
    (folder / "chain.txt").symlink_to("secret.txt")
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    (folder / "places").symlink_to(outside, target_is_directory=True)
    (folder / "again").symlink_to(folder, target_is_directory=True)
    (folder / "circle.txt").symlink_to("circle.txt")
    found = find_documents([folder, other])
    assert list(found.files) == [
        folder / name for name in ("circle.txt", "given too.txt", "text.txt", "within.txt")
    ] + [other / "text.txt"]
    assert {Path(each.path).name for each in found.skipped} == {"secret.txt", "chain.txt", "gone.txt", "places"}
    assert all("link out of the folder" in each.reason for each in found.skipped)

    some = find_documents([folder], include=["*.txt"], exclude=["secret*"])
    assert folder / "secret.txt" not in some.files
    assert {Path(each.path).name for each in some.skipped} == {"chain.txt", "gone.txt", "given too.txt"}


def test_a_link_given_as_an_argument_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text("text")
    link, linked = tmp_path / "link.txt", tmp_path / "linked"
    link.symlink_to(tmp_path / "folder" / "text.txt")
    linked.symlink_to(tmp_path / "folder", target_is_directory=True)
    assert list(find_documents([link, linked]).files) == [link, linked / "text.txt"]
    within = tmp_path / "folder" / "again"
    within.symlink_to(tmp_path / "folder", target_is_directory=True)
    assert list(find_documents([tmp_path / "folder", within]).files) == [
        within.parent / "text.txt",
        within / "text.txt",
    ]
