"""Ranked when the chunk is indexed: no dense pass, and no look at the prompt's own KV deviation."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy, highest


class StaticPolicy(SelectionPolicy):
    """Highest static deviation (:mod:`cacheblend_rag.blending.static`). The selection is known before the first layer runs."""

    name = "static"
    needs_static = True
    without_static = "hkvd"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the ``count`` tokens of highest static deviation; the earlier one where two are equal."""
        assert candidates.static is not None
        return highest(candidates.static, count)


class StaticQueryPolicy(SelectionPolicy):
    """Square root of the static deviation times the question's attention over stored KV.

    The root brings the squared distance to the scale of the attention; what deviates unread scores low, as does what is read but
    right. Needs all layers' KV before it selects, but no dense pass.
    """

    name = "static-query"
    needs_static = True
    needs_attention = True
    without_static = "hkvd"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the ``count`` tokens of highest score; the earlier one where two are equal."""
        assert candidates.static is not None
        assert candidates.attention is not None
        return highest(candidates.static.sqrt() * candidates.attention, count)
