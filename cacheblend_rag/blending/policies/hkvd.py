"""Chooses the HKVD tokens, whose KV deviates most (CacheBlend, arXiv 2405.16444, section 4)."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy


class HKVDPolicy(SelectionPolicy):
    """Scores by KV deviation at the check layer; the fusor narrows the set with depth (gradual filtering)."""

    name = "hkvd"
    needs_deviation = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the KV deviation."""
        assert candidates.deviation is not None
        return candidates.deviation
