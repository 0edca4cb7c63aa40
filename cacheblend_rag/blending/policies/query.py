"""Chooses the tokens that the question attends to most (as ProphetKV, arXiv 2602.02579, and A³, arXiv 2511.17560, propose)."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class QueryPolicy(SelectionPolicy):
    """Scores by the question's attention over stored KV. Needs no check layer, but all layers' KV beforehand."""

    name = "query"
    needs_attention = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the question's attention."""
        assert candidates.attention is not None
        return candidates.attention
