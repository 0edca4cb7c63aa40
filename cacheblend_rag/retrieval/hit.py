"""Defines a search result. Another process can read a search result back without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.prompts.chunk import Chunk


@dataclass(frozen=True)
class Hit:
    """Holds a chunk found by a search, and one place where the chunk stands; an answer names hits as its sources.

    Attributes:
        chunk: The chunk, with the metadata of this place.
        score: Cosine similarity to the question, or to the question with the previous turn; None for a chunk that was
            added: a neighbour of a hit, or a chunk of the previous turn.
        path: Path of the document.
        ordinal: Position of the chunk in that document, from 0.
    """

    chunk: Chunk
    score: float | None
    path: str
    ordinal: int

    @property
    def id(self) -> str:
        """Return the chunk's id."""
        return self.chunk.id

    @property
    def text(self) -> str:
        """Return the chunk's text."""
        return self.chunk.text

    @property
    def relevance(self) -> str:
        """Return the score in words, or ``came along`` for a chunk without a score."""
        return "came along" if self.score is None else f"score {self.score:.2f}"

    @property
    def page(self) -> int | None:
        """Return the page on which the chunk begins, from 1, or None if no page is known."""
        return self.chunk.metadata.get("page")

    @property
    def pages(self) -> str:
        """Return the pages in words, such as ``page 3`` or ``pages 3-4``, or an empty string if no page is known."""
        if self.page is None:
            return ""
        word, last = "slide" if self.path.lower().endswith(".pptx") else "page", self.chunk.metadata.get("last_page")
        return f"{word} {self.page}" if last is None else f"{word}s {self.page}-{last}"

    @property
    def place(self) -> str:
        """Return the chunk's place in the document in words: the pages, or else the number of the chunk."""
        return self.pages or f"chunk {self.ordinal}"
