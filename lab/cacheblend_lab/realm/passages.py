"""Reads files as passages, cut between sentences, and splits the passages into word pieces."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_lab.rows import read_rows
from cacheblend_rag.errors import InputError
from cacheblend_rag.retrieval.documents import SkippedDocument, find_documents, load_document

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])|\n+")
_HEADING = re.compile(r"^#{1,6}[ \t]+(?P<title>.+?)[ \t]*$", re.MULTILINE)

Span = tuple[int, int]


@dataclass(frozen=True)
class Passage:
    """Holds a piece of an article."""

    title: str
    text: str


@dataclass(frozen=True)
class Tokenized:
    """Holds a passage as word pieces, without special tokens.

    Attributes:
        title: Ids of the title.
        body: Ids of the text.
        offsets: Begin and end, in characters of the text, of each id of ``body``.
    """

    title: list[int]
    body: list[int]
    offsets: list[Span]

    def pieces(self, start: int, end: int) -> Span | None:
        """Return the first and last position in ``body`` that touch characters ``[start, end)``; None if none does."""
        inside = [at for at, (first, last) in enumerate(self.offsets) if first < end and last > start]
        return (inside[0], inside[-1]) if inside else None


def sentences(text: str) -> list[Span]:
    """Return begin and end of each sentence of ``text``, without surrounding white space."""
    found, start = [], 0
    for match in [*_SENTENCE_END.finditer(text), None]:
        end = len(text) if match is None else match.start()
        piece = text[start:end]
        if piece.strip():
            begin = start + len(piece) - len(piece.lstrip())
            found.append((begin, begin + len(piece.strip())))
        start = end if match is None else match.end()
    return found


def cut(title: str, text: str, tokenizer: Any, size: int) -> Iterator[Passage]:
    """Cut an article into passages of at most ``size`` word pieces, between sentences.

    A longer sentence becomes a passage of its own; the model reads its first ``size`` word pieces.
    """
    spans = sentences(text)
    lengths = [
        len(ids)
        for ids in tokenizer([text[a:b] for a, b in spans], add_special_tokens=False, verbose=False)["input_ids"]
    ]
    first, used = 0, 0
    for at, length in enumerate(lengths):
        if used and used + length > size:
            yield Passage(title, text[spans[first][0] : spans[at - 1][1]])
            first, used = at, 0
        used += length
    if used:
        yield Passage(title, text[spans[first][0] : spans[-1][1]])


def tokenize(passages: Sequence[Passage], tokenizer: Any, size: int, title_size: int = 16) -> list[Tokenized]:
    """Return each passage as at most ``size`` word pieces of text and at most ``title_size`` of its title."""
    if not passages:
        return []
    titles = tokenizer([p.title for p in passages], add_special_tokens=False, verbose=False)["input_ids"]
    encoded = tokenizer(
        [p.text for p in passages], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    return [
        Tokenized(title[:title_size], body[:size], [(int(a), int(b)) for a, b in offsets[:size]])
        for title, body, offsets in zip(titles, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def read_corpus(path: Path, tokenizer: Any, size: int) -> list[Passage]:
    """Read a corpus and cut it into passages.

    Args:
        path: A directory or file of documents (all types that `cacheblend index` reads; a Markdown heading is the title
            of the text below it), a ``.jsonl`` or ``.jsonl.gz`` of ``{"title", "text"}``, or DPR's ``.tsv`` of id, text
            and title.
        tokenizer: Counts the word pieces.
        size: Most word pieces of a passage.

    Raises:
        InputError: The path does not exist, or holds fewer than two passages.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        articles: Iterable[tuple[str, str]] = _rows(path)
    elif name.endswith(".tsv"):
        articles = _tab_separated(path)
    else:
        articles = _documents(path)
    found = [passage for title, text in articles for passage in cut(title, text, tokenizer, size)]
    if len(found) < 2:
        raise InputError(f"{path} holds {len(found)} passage: retrieval needs at least 2. Give more documents.")
    return found


def save_passages(passages: Iterable[Passage], path: Path) -> None:
    """Write passages as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages)


def load_passages(path: Path) -> list[Passage]:
    """Read the passages that :func:`save_passages` wrote.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return [Passage(row["title"], row["text"]) for row in map(json.loads, file)]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as passages: {error}.") from error


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    for where, row in read_rows(path).rows:
        text = row.get("text", row.get("contents"))
        if not isinstance(text, str):
            raise InputError(f'{path}, {where}: a passage is {{"title": "...", "text": "..."}}, and text is missing.')
        yield str(row.get("title") or ""), text


def _tab_separated(path: Path) -> Iterator[tuple[str, str]]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if row.get("text") is None:
                    raise InputError(f"{path}: the first line must name the columns id, text and title.")
                yield row.get("title") or "", row["text"]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    for file in find_documents([path]).files:
        document = load_document(file)
        if isinstance(document, SkippedDocument):
            continue
        title = str(document.metadata.get("title") or file.stem.replace("-", " ").replace("_", " "))
        headings = list(_HEADING.finditer(document.text))
        edges = [0, *(heading.start() for heading in headings), len(document.text)]
        titles = [title, *(heading["title"] for heading in headings)]
        starts = [0, *(heading.end() for heading in headings)]
        for name, start, end in zip(titles, starts, edges[1:], strict=True):
            if document.text[start:end].strip():
                yield name, document.text[start:end]
