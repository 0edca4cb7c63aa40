"""Deviation and the question's attention together, with each chunk's first tokens forced."""

from __future__ import annotations

from typing import Final

import torch

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy, highest

_SINKS: Final = 2
_WINDOW: Final = 7
# Keeps tokens that hardly deviate but are read much from scoring zero.
_FLOOR: Final = 0.1


class HybridPolicy(SelectionPolicy):
    """Rank of the question's attention times rank of the KV deviation; the attention is smoothed over neighbours.

    Neither alone says what matters: a token may deviate unread, or be read although it is right.
    """

    name = "hybrid"
    needs_deviation = True
    needs_attention = True

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return ``count`` tokens: the first two of every chunk as far as they fit, then those of the highest score."""
        assert candidates.attention is not None
        assert candidates.deviation is not None
        score = _ranks(_smoothed(candidates)) * (_ranks(candidates.deviation) + _FLOOR)
        score = score.masked_fill(candidates.offset < _SINKS, float("inf"))
        return highest(score, count)


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Return ranks from 0 to 1, ascending with the values; of equal values the later one ranks lower."""
    order = torch.argsort(values, descending=True, stable=True)
    ranks = torch.empty(len(values), dtype=torch.float32, device=values.device)
    ranks[order] = torch.linspace(1, 0, len(values), device=values.device)
    return ranks


def _smoothed(candidates: Candidates) -> torch.Tensor:
    """Return the attention averaged over up to seven neighbours of the same chunk."""
    assert candidates.attention is not None
    total, number = torch.zeros_like(candidates.attention), torch.zeros_like(candidates.attention)
    places = torch.arange(len(candidates.positions), device=candidates.positions.device)
    for shift in range(-(_WINDOW // 2), _WINDOW // 2 + 1):
        at = places + shift
        inside = (at >= 0) & (at < len(places))
        near = at.clamp(0, max(0, len(places) - 1))
        # With gradual filtering neighbours may be gone: what stands next is near only if its position is.
        inside &= candidates.chunk[near] == candidates.chunk
        inside &= (candidates.offset[near] - candidates.offset).abs() <= _WINDOW // 2
        total += torch.where(inside, candidates.attention[near], 0.0)
        number += inside
    return total / number
