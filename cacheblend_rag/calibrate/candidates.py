"""Lists the candidates of a calibration: policies, ratios and check layers, in order of their compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cacheblend_rag.blending.policies import POLICIES, highest, policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.calibrate.compared import PromptMeasurement

RATIOS: Final = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.45, 0.6)
_PAPER_RATIO: Final = 0.15
# A deeper check layer's overlap must exceed the best overlap of the layers offered before it by this much.
_GAIN: Final = 0.1
_WIDE: Final = 2.5
# Multiple of the rotation's rounding error above which a deviation is visible. Only rounding moves KV in layer 0.
_ABOVE_ROUNDING: Final = 100.0


@dataclass(frozen=True)
class Candidate:
    """Holds one way to blend. A ratio of 0 is full KV reuse; a policy that measures no KV deviation has no check layers."""

    policy: str
    ratio: float
    check_layers: tuple[int, ...] = ()
    widths: tuple[float, ...] = ()

    @property
    def options(self) -> FuseOptions:
        """Return the fusor's options for the candidate."""
        return FuseOptions(policy(self.policy), self.ratio, self.check_layers or (1,), self.widths)

    def __str__(self) -> str:
        """Return policy, ratio and check layers in words."""
        layers = f" at layer {', '.join(map(str, self.check_layers))}" if self.check_layers else ""
        return f"{self.policy} {self.ratio:.0%}{layers}" if self.ratio else "full KV reuse"


@dataclass(frozen=True)
class LayerFinding:
    """Holds how useful one layer is as a check layer.

    Attributes:
        layer: The layer.
        overlap: Share of the 15% of tokens that deviate most over all layers that are also in the top 15% at this
            layer.
        visible: Share of the tokens whose KV deviates by more than rounding at this layer. Behind a sliding window
            shorter than the chunks most tokens do not deviate, and rounding would decide among them.
        offered: Whether calibration tries the layer: it is shallow enough to pay, not blind, and better than earlier
            layers.
    """

    layer: int
    overlap: float
    visible: float
    offered: bool


LayerValues = list[tuple[float, float]]
"""Overlap and visible (see :class:`LayerFinding`) of each layer from 1 on, in one prompt."""


def layer_values(measured: PromptMeasurement) -> LayerValues:
    """Return overlap and visible of each layer from 1 on, in one prompt."""
    deviation, sizes = measured.deviation()
    relative, later = deviation / sizes[:, None].clamp_min(1e-30), deviation[1:]
    overall = (later / later.mean(1, keepdim=True).clamp_min(1e-30)).sum(0)
    rounding = _ABOVE_ROUNDING * max(float(relative[0].max()), float(torch.finfo(torch.float32).eps) ** 2)
    return [
        (_overlap(each, overall), float((relative[layer] > rounding).float().mean()))
        for layer, each in enumerate(later, 1)
    ]


def examine_layers(prompts: Sequence[LayerValues], num_layers: int) -> list[LayerFinding]:
    """Return the finding of each layer from 1 on, with the mean values over prompts."""
    found: list[LayerFinding] = []
    best = 0.0
    for layer in range(1, num_layers):
        overlap, visible = (float(x) for x in np.mean([each[layer - 1] for each in prompts], 0))
        # A dense pass over more than half of the layers costs more than blending saves.
        pays = layer <= max(1, num_layers // 2)
        offered = pays and visible >= RATIOS[0] and overlap >= best + (_GAIN if best else 0.0)
        best = max(best, overlap) if offered else best
        found.append(LayerFinding(layer, overlap, visible, offered))
    return found


def list_candidates(
    layers: Sequence[LayerFinding], num_layers: int, stale: float, forced: float, *, ranked: bool
) -> list[Candidate]:
    """Return the candidates to try, the least compute first.

    Args:
        layers: Findings of the layers.
        num_layers: Number of the model's layers.
        stale: Share of a prompt's tokens with stale KV.
        forced: Share of a prompt's tokens that are always computed.
        ranked: Whether chunks have static deviations.
    """
    visible = {each.layer: each.visible for each in layers if each.offered}
    found = [Candidate("full-reuse", 0.0)]
    usable = [name for name in POLICIES if ranked or not policy(name).needs_static]
    checking = [name for name in usable if policy(name).needs_deviation]
    found += [Candidate(name, ratio) for name in usable if name not in checking for ratio in RATIOS]
    found += [
        each
        for name in checking
        for schedule in _schedules(list(visible))
        for each in (Candidate(name, ratio, *schedule) for ratio in RATIOS)
        if _sees_enough(each, visible)
    ]
    return sorted(found, key=lambda each: estimate_compute(each, num_layers, stale, forced))


def estimate_compute(candidate: Candidate, num_layers: int, stale: float, forced: float) -> float:
    """Return the estimated compute of a blend (dense, question's and sparse pass), as a share of a full recompute."""
    total = candidate.ratio * stale + forced
    if policy(candidate.policy).needs_attention:
        total += forced
    sizes = [1.0, *(min(1.0, candidate.ratio * width) for width in candidate.widths[:-1])]
    dense = sum(size * layer for size, layer in zip(sizes, candidate.check_layers, strict=False))
    return total + stale * dense / num_layers


def _schedules(layers: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return, as check layers and widths, each layer alone, and each layer followed by the deepest layer.

    The deepest layer is the best one, to which gradual filtering narrows the set.
    """
    alone = [((layer,), (1.0,)) for layer in layers]
    return [*alone, *(((layer, layers[-1]), (_WIDE, 1.0)) for layer in layers[:-1])]


def _sees_enough(candidate: Candidate, visible: Mapping[int, float]) -> bool:
    """Return whether each check layer has at least as many visibly deviating tokens as the blend chooses at that layer."""
    pairs = zip(candidate.check_layers, candidate.widths, strict=True)
    return all(min(1.0, candidate.ratio * width) <= visible[layer] for layer, width in pairs)


def _overlap(deviation: torch.Tensor, overall: torch.Tensor) -> float:
    count = max(1, round(_PAPER_RATIO * len(overall)))
    return int((highest(deviation, count) & highest(overall, count)).sum()) / count
