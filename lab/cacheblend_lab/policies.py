"""Holds baseline policies, which the library never chooses by itself; policies of other packages are found in the same way.

`pyproject.toml` names the policies among its entry points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from cacheblend_rag.blending.policies import Candidates, SelectionPolicy

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.engines.base import BlendEngine

_SINKS: Final = 2
_WINDOW: Final = 7
# Tokens with little deviation but much attention must not score zero.
_FLOOR: Final = 0.1


class FullRecomputePolicy(SelectionPolicy):
    """Recomputes every token, which equals the full prefill."""

    name = "full-recompute"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return 1 for every token."""
        return candidates.positions.new_ones(len(candidates.positions))

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return all tokens."""
        return super().select(candidates, len(candidates.positions))


class HybridPolicy(SelectionPolicy):
    """Scores by the rank of the question's attention, smoothed over neighbours, times the rank of the KV deviation.

    Each score alone is insufficient: a token may deviate without attention, or get attention although its KV is right.
    """

    name = "hybrid"
    needs_deviation = True
    needs_attention = True
    without_attention = "hkvd"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return the product of the two ranks, from 0 to 1.1; infinity for the first two tokens of every chunk."""
        assert candidates.attention is not None
        assert candidates.deviation is not None
        score = _places(_smoothed(candidates)) * (_places(candidates.deviation) + _FLOOR)
        return score.masked_fill(candidates.offset < _SINKS, float("inf"))


def _places(values: torch.Tensor) -> torch.Tensor:
    """Return each value's rank in ascending order, scaled from 0 to 1; among equal values the later one is lower."""
    order = torch.argsort(values, descending=True, stable=True)
    places = torch.empty(len(values), dtype=torch.float32, device=values.device)
    places[order] = torch.linspace(1, 0, len(values), device=values.device)
    return places


def _smoothed(candidates: Candidates) -> torch.Tensor:
    """Return the attention averaged over up to seven neighbours of the same chunk."""
    assert candidates.attention is not None
    total, number = torch.zeros_like(candidates.attention), torch.zeros_like(candidates.attention)
    indices = torch.arange(len(candidates.positions), device=candidates.positions.device)
    for shift in range(-(_WINDOW // 2), _WINDOW // 2 + 1):
        at = indices + shift
        inside = (at >= 0) & (at < len(indices))
        near = at.clamp(0, max(0, len(indices) - 1))
        # With gradual filtering neighbours may be missing, so that the next candidate is near only if its position is.
        inside &= candidates.chunk[near] == candidates.chunk
        inside &= (candidates.offset[near] - candidates.offset).abs() <= _WINDOW // 2
        total += torch.where(inside, candidates.attention[near], 0.0)
        number += inside
    return total / number


class SinkPolicy(SelectionPolicy):
    """Scores chunk-initial tokens highest (EPIC / LegoLink, arXiv 2410.15332). Needs no check layer.

    Chunk-initial tokens act as attention sinks when a chunk is computed alone.
    """

    name = "sink"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return each token's negated distance from its chunk's start."""
        return -candidates.offset

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return about ``count`` tokens: equally many from the start of each chunk, at least one if ``count`` is not 0."""
        if count >= len(candidates.positions):
            return torch.ones_like(candidates.positions, dtype=torch.bool)
        chunks = int(candidates.chunk.max()) + 1 if len(candidates.chunk) else 0
        each = max(1, round(count / chunks)) if count and chunks else 0
        return self.score(candidates) > -each


class RandomPolicy(SelectionPolicy):
    """Scores by a random order, as a baseline for other policies; for one prompt layout every rank has the same order."""

    name = "random"

    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return a different number for each token."""
        # The order is drawn on the CPU, because devices have different generators.
        generator = torch.Generator().manual_seed(int(candidates.positions.sum()))
        # A token's score is its negated place in the order, so that the first token scores highest.
        return -torch.randperm(len(candidates.positions), generator=generator).argsort().to(candidates.positions.device)


def rank_for(engine: BlendEngine, *settings: BlendSettings) -> None:
    """Make an engine measure static deviations with the KV from now on, if a blend by one of ``settings`` needs them."""
    wanted = (engine.profile.resolve(each, engine.num_layers, engine.controlled) for each in settings)
    if any(each.reuse == "chunks" and (each.auto or each.policy.needs_static) for each in wanted):
        engine.ranking = "now"
