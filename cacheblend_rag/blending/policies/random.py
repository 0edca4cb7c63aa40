"""Tokens drawn at random: the baseline that says whether a policy knows anything."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class RandomPolicy(SelectionPolicy):
    """Tokens drawn uniformly, without replacement; the same ones for the same prompt layout on every rank."""

    name = "random"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return exactly ``count`` tokens, or all if there are fewer."""
        total = len(candidates.positions)
        # Drawn on the CPU: devices have generators of their own.
        generator = torch.Generator().manual_seed(int(candidates.positions.sum()) if total else 0)
        mask = torch.zeros(total, dtype=torch.bool)
        mask[torch.randperm(total, generator=generator)[:count]] = True
        return mask.to(candidates.positions.device)
