"""Reads files as passages, cut between sentences, and turns passages and queries into BERT's inputs."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


MASKED_MOST = 10
"""Most word pieces of a masked span."""


@dataclass(frozen=True)
class Inputs:
    """Holds a batch of texts as BERT's inputs.

    Attributes:
        ids: ``[texts, tokens]``, padded.
        mask: ``[texts, tokens]``: 1 for tokens, 0 for padding.
        segments: ``[texts, tokens]``: 1 for the tokens of a pair's passage.
        bodies: ``[texts, 2]``: begin and end of the passage's text in a pair.
    """

    ids: Tensor
    mask: Tensor
    segments: Tensor
    bodies: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """Return the inputs as keyword arguments of `BertModel`."""
        return {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.segments}

    def readable(self) -> Tensor:
        """Return ``[texts, tokens]``: 1 for tokens of the passage's text, which may hold answers."""
        at = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        return ((at >= self.bodies[:, :1]) & (at < self.bodies[:, 1:])).long()


@dataclass(frozen=True)
class Query:
    """Holds a question, or a sentence with a masked span.

    Attributes:
        ids: Word pieces, without special tokens.
        masked: Positions of the masks in ``ids``.
        targets: Word piece that each mask replaces.
    """

    ids: list[int]
    masked: list[int]
    targets: list[int]

    @classmethod
    def question(cls, text: str, tokenizer: Any, size: int) -> Query:
        """Return a question, cut to at most ``size`` word pieces."""
        return cls(tokenizer(text, add_special_tokens=False, truncation=True, max_length=size)["input_ids"], [], [])


class Collator:
    """Makes tensors from word pieces, for one tokenizer on one device."""

    def __init__(self, tokenizer: Any, device: torch.device):
        """Read the special tokens of ``tokenizer``."""
        self.cls, self.sep, self.pad, self.mask = (
            tokenizer.cls_token_id,
            tokenizer.sep_token_id,
            tokenizer.pad_token_id,
            tokenizer.mask_token_id,
        )
        self.device = device

    def queries(self, queries: Sequence[Query]) -> Inputs:
        """Return ``[CLS] x [SEP]`` for each query."""
        return self._inputs([([self.cls, *q.ids, self.sep], 0, 0, 0) for q in queries])

    def documents(self, passages: Sequence[Tokenized | None]) -> Inputs:
        """Return ``[CLS] title [SEP] text [SEP]`` for each passage; None, the null document, gives ``[CLS] [SEP]``."""
        return self._inputs([([self.cls, *self._passage(p)], 0, 0, 0) for p in passages])

    def pairs(self, queries: Sequence[Query], passages: Sequence[Tokenized | None]) -> Inputs:
        """Return ``[CLS] x [SEP] title [SEP] text [SEP]`` for each query and the passage at the same position."""
        rows = []
        for query, passage in zip(queries, passages, strict=True):
            first = [self.cls, *query.ids, self.sep]
            body = len(first) + (len(passage.title) + 1 if passage is not None else 0)
            length = len(passage.body) if passage is not None else 0
            rows.append(([*first, *self._passage(passage)], len(first), body, body + length))
        return self._inputs(rows)

    def _passage(self, passage: Tokenized | None) -> list[int]:
        if passage is None:
            return [self.sep]
        return [*passage.title, self.sep, *passage.body, self.sep]

    def _inputs(self, rows: Sequence[tuple[list[int], int, int, int]]) -> Inputs:
        width = max(len(ids) for ids, *_ in rows)
        ids = torch.full((len(rows), width), self.pad)
        mask, segments = torch.zeros_like(ids), torch.zeros_like(ids)
        for at, (row, second, _, _) in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            mask[at, : len(row)] = 1
            if second:
                segments[at, second : len(row)] = 1
        bodies = torch.tensor([(begin, end) for *_, begin, end in rows])
        return Inputs(*(tensor.to(self.device) for tensor in (ids, mask, segments, bodies)))
