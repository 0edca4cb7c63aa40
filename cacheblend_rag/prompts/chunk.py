"""Defines a chunk: the unit of retrieval and of KV reuse, named by its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.tokens import encoder_for, pack_ids


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, the unit of retrieval and of KV reuse.

    Attributes:
        id: Content hash of the text; the same text has the same id everywhere.
        text: The exact text, without outer whitespace.
        token_ids: Its tokens, as the model will see them; never re-tokenised. Of a tokenizer that joins a text's last characters
            with the blank line behind them, without that last token.
        metadata: ``source``, ``start`` and ``end`` (character offsets in the source), and what else the loader knows.
        metadata_bytes: Their size as JSON; 0 without any.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    metadata_bytes: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be stored and found again, or be answered.

        Raises:
            InputError: The id has a NUL, or the metadata hold what is no JSON.
        """
        checked_id(self.id)
        if self.metadata:
            try:
                object.__setattr__(self, "metadata_bytes", len(_JSON.encode(dict(self.metadata))))
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(
                    f"the metadata of the chunk {self.id!r} cannot be written as JSON ({error}). Use None for a number that is "
                    "missing (NaN) or infinite."
                ) from None


@dataclass(frozen=True)
class PlainText:
    """Text in which nothing is a special token, such as a part of a known document whose KV is not used here."""

    text: str


_JSON = json.JSONEncoder(allow_nan=False, default=str)


def checked_id(name: str) -> str:
    """Return a chunk's id; raises InputError for one with a NUL, behind which SQLite's functions read no further."""
    if "\0" in name:
        raise InputError(f"the id {name!r} has a NUL character. Use another id.")
    return name


def chunk_id(text: str) -> str:
    """Return the id of a chunk with that text: 128 bits of its SHA-256, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def make_chunk(text: str, tokenizer: Any, metadata: Mapping[str, Any] | None = None) -> Chunk:
    """Make one chunk of text that is already cut, by whatever splitter.

    Outer whitespace is stripped, because prompts and chat templates strip it too. Strings such as ``<|im_end|>`` in the
    text are encoded as plain text and never become control tokens.

    Raises:
        InputError: The text holds nothing but whitespace, or is not valid Unicode.
    """
    text = text.strip()
    if not text:
        raise InputError("A chunk needs some text; this one is empty or whitespace only.")
    return Chunk(chunk_id(text), text, pack_ids(encoder_for(tokenizer).chunk(text)[0]), dict(metadata or {}))
