"""Chooses tokens at random: the baseline that says whether a policy knows anything."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class RandomPolicy(SelectionPolicy):
    """Scores by a random order; the same one for the same prompt layout on every rank."""

    name = "random"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return a number of its own for each token."""
        # Drawn on the CPU: devices have generators of their own.
        generator = torch.Generator().manual_seed(int(candidates.positions.sum()))
        # A token's number is its place in the order, negated: the first come highest.
        return -torch.randperm(len(candidates.positions), generator=generator).argsort().to(candidates.positions.device)
