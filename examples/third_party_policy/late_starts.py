"""Chooses the first tokens of chunks, more of them in later chunks, which have missed more text in front of them."""

from __future__ import annotations

import torch

from cacheblend_rag import Candidates, SelectionPolicy


class LateStarts(SelectionPolicy):
    """Scores a token by its chunk's number over its own number in the chunk. Needs nothing measured."""

    name = "late-starts"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the quotient, ``[candidates]``."""
        return (candidates.chunk + 1) / (candidates.offset + 1)
