"""The tokens that the question attends to most (as ProphetKV, arXiv 2602.02579, and A³, arXiv 2511.17560, propose)."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy, highest


class QueryPolicy(SelectionPolicy):
    """Highest attention of the question, measured over stored KV. Needs no check layer, but all layers' KV beforehand."""

    name = "query"
    needs_attention = True

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the ``count`` tokens of highest attention; the earlier one where two are equal."""
        assert candidates.attention is not None
        return highest(candidates.attention, count)
