"""Chooses by how far a token's KV moved when its chunk was indexed: no dense pass, and no look at the prompt's own deviation."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class StaticPolicy(SelectionPolicy):
    """Scores by static deviation (:mod:`cacheblend_rag.blending.static`), so that all is chosen before the first layer runs."""

    name = "static"
    needs_static = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the static deviation."""
        assert candidates.static is not None
        return candidates.static


class StaticQueryPolicy(SelectionPolicy):
    """Scores by the square root of the static deviation times the question's attention over stored KV.

    The root brings the squared distance to the scale of the attention; what deviates unread scores low, as does what is read but
    right. Needs all layers' KV before it selects, but no dense pass.
    """

    name = "static-query"
    needs_static = True
    needs_attention = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the product."""
        assert candidates.static is not None
        assert candidates.attention is not None
        return candidates.static.sqrt() * candidates.attention
