"""Chooses the first tokens of every chunk (EPIC / LegoLink, arXiv 2410.15332)."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class SinkPolicy(SelectionPolicy):
    """Scores chunk-initial tokens highest: they act as attention sinks when a chunk is computed alone. Needs no check layer."""

    name = "sink"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return how near each token is to its chunk's beginning."""
        return -candidates.offset

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return about ``count`` tokens: equally many from the start of each chunk, at least one if ``count`` is not 0."""
        if count >= len(candidates.positions):
            return torch.ones_like(candidates.positions, dtype=torch.bool)
        chunks = int(candidates.chunk.max()) + 1 if len(candidates.chunk) else 0
        each = max(1, round(count / chunks)) if count and chunks else 0
        return self.score(candidates) > -each
