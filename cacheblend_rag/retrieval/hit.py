"""Holds what a search returns; reading it back from another process imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.prompts.chunk import Chunk


@dataclass(frozen=True)
class Hit:
    """A chunk found, in one of the places it stands: what a search returns, and what an answer names as its source.

    Attributes:
        chunk: The chunk, with the metadata of this place.
        score: Cosine similarity to the question, or to it and the turn before; None for a chunk that came along: a neighbour, or
            a chunk of the turn before.
        path: The document.
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
        """Return the score in words, or that the chunk came along."""
        return "came along" if self.score is None else f"score {self.score:.2f}"

    @property
    def page(self) -> int | None:
        """Return the page of the document that it begins on, from 1; None where there are none, or none were noted."""
        return self.chunk.metadata.get("page")

    @property
    def pages(self) -> str:
        """Return the pages in words, as ``page 3`` or ``pages 3-4``; empty where the document has none."""
        if self.page is None:
            return ""
        word, last = "slide" if self.path.lower().endswith(".pptx") else "page", self.chunk.metadata.get("last_page")
        return f"{word} {self.page}" if last is None else f"{word}s {self.page}-{last}"

    @property
    def place(self) -> str:
        """Return where in the document it stands, in words: its pages, else the number of the chunk."""
        return self.pages or f"chunk {self.ordinal}"
