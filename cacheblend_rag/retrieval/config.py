"""Says how an index was made: kept in its file, and compared with what it is opened for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend_rag.errors import InputError, StoreMismatchError
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

DEFAULT_CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS = 16
"""Below this a single character (18 letters after normalisation, or 4 bytes) may not fit."""


@dataclass(frozen=True)
class IndexConfig:
    """Says how an index was made; opening it with anything else is refused.

    Attributes:
        model: The LLM whose tokens the chunks are made of.
        header_ids: Tokens in front of every chunk when its KV is computed.
        chunk_tokens: Most tokens in a chunk.
        overlap: Tokens repeated from one chunk to the next.
        embedding: Name or path of the sentence-transformers model; None takes what the index has, or the default for a new one.
        writer: The KV writer that has written the KV of all chunks; None for the model itself. It may change.
    """

    model: ModelFingerprint
    header_ids: tuple[int, ...] = ()
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    overlap: int = 0
    embedding: str | None = None
    writer: WrittenBy | None = None

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> IndexConfig:
        """Read the stored form."""
        fields = json.loads(text)
        model, header = ModelFingerprint(**fields.pop("model")), tuple(fields.pop("header_ids"))
        writer = fields.pop("writer", None)
        return cls(model=model, header_ids=header, writer=writer and WrittenBy(**writer), **fields)

    def unused_by(self, writer: WrittenBy | None) -> str | None:
        """Return what to do where the KV that this index's writer has written is not that of ``writer``; None where it is."""
        if self.writer is None or writer == self.writer:
            return None
        anew = "chunks behind a prompt's first are computed anew"
        if writer is not None and writer.directory == self.writer.directory:
            return f"The KV writer in {writer.directory} has changed since it wrote these documents: {anew}. Index them again."
        instead, other = "the model's own is, which takes more recomputation", ""
        if writer is not None:
            instead, other = anew, f", or index them again with the one in {writer.directory}"
        return (
            f"The KV of these documents was written by the KV writer in {self.writer.directory}. Without it that is not used: "
            f"{instead}. Give --writer {self.writer.directory}{other}."
        )

    def check(self, wanted: IndexConfig, directory: Path) -> None:
        """Refuse to be used as ``wanted``.

        Raises:
            StoreMismatchError: They differ; the message names both sides and what to do.
        """
        wrong: list[str] = []
        if wanted.model != self.model and wanted.model.name == self.model.name:
            wrong.append(
                f"it was made for {self.model.name} with other weights, or in another dtype ({self.model.digest[:8]}, now "
                f"{wanted.model.digest[:8]}): use those"
            )
        elif wanted.model != self.model:
            wrong.append(
                f"it was made for the model {self.model.name} ({self.model.digest[:8]}), not for {wanted.model.name} "
                f"({wanted.model.digest[:8]}): use --model {self.model.name}"
            )
        elif wanted.header_ids != self.header_ids:
            wrong.append(
                f"its chunks stand behind another prompt header ({len(self.header_ids)} tokens, now "
                f"{len(wanted.header_ids)}): use the chat template and instruction it was made with"
            )
        mine, theirs = (self.chunk_tokens, self.overlap), (wanted.chunk_tokens, wanted.overlap)
        if mine != theirs:
            wrong.append(
                f"it is cut into chunks of {mine[0]} tokens (overlap {mine[1]}), not {theirs[0]} (overlap {theirs[1]}): "
                "use the same settings"
            )
        if wanted.embedding not in (None, self.embedding):
            wrong.append(
                f"its embedding model is {self.embedding}, not {wanted.embedding}: use that one, or rebuild the index"
            )
        if wrong:
            raise StoreMismatchError(
                f"The index in {directory} does not fit: {'; '.join(wrong)}. Or index into another directory."
            )


def check_sizes(max_tokens: int, overlap: int) -> None:
    """Refuse sizes of chunks that are out of range; raises InputError."""
    if max_tokens < MIN_CHUNK_TOKENS:
        raise InputError(f"max_tokens is {max_tokens}; a chunk needs at least {MIN_CHUNK_TOKENS}.")
    if not 0 <= overlap <= max_tokens // 2:
        raise InputError(f"overlap is {overlap}; give 0 to half of max_tokens ({max_tokens // 2}).")
