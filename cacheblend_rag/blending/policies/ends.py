"""Chooses nothing or everything, the two ends of the range: the baselines full KV reuse and full recompute."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class FullReusePolicy(SelectionPolicy):
    """Recomputes nothing: full KV reuse, with positions corrected."""

    name = "full-reuse"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return 0 for every token."""
        return torch.zeros_like(candidates.positions)

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return an empty selection."""
        return super().select(candidates, 0)


class FullRecomputePolicy(SelectionPolicy):
    """Recomputes everything: equal to the full prefill."""

    name = "full-recompute"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return 1 for every token."""
        return torch.ones_like(candidates.positions)

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return all tokens."""
        return super().select(candidates, len(candidates.positions))
