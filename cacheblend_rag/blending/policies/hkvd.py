"""HKVD: the tokens whose KV deviates most (CacheBlend, arXiv 2405.16444, section 4)."""

from __future__ import annotations

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy, highest


class HKVDPolicy(SelectionPolicy):
    """Highest KV deviation at the check layer; the fusor narrows the set with depth (gradual filtering)."""

    name = "hkvd"
    needs_deviation = True

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return the ``count`` tokens of highest deviation; the earlier one where two are equal."""
        assert candidates.deviation is not None
        return highest(candidates.deviation, count)
