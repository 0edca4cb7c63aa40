"""The two ends of the range, which are also the baselines: full KV reuse and full recompute."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class FullReusePolicy(SelectionPolicy):
    """Recompute nothing: full KV reuse, with positions corrected."""

    name = "full-reuse"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return an empty selection."""
        return torch.zeros_like(candidates.positions, dtype=torch.bool)


class FullRecomputePolicy(SelectionPolicy):
    """Recompute everything: equal to the full prefill."""

    name = "full-recompute"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return all tokens."""
        return torch.ones_like(candidates.positions, dtype=torch.bool)
