"""Joins word pieces into BERT's input format, and pads them into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cacheblend_lab.realm.passages import Tokenized

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
