"""Lists the candidates of a calibration: policies, ratios and check layers, in order of their compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from cacheblend_rag.blending.policies import POLICIES, highest, policy
from cacheblend_rag.blending.settings import BlendSchedule, FuseOptions
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
    """Holds one way to blend. A ratio of 0 is full KV reuse."""

    policy: str
    ratio: float
    schedule: BlendSchedule = field(default_factory=BlendSchedule)

    @property
    def options(self) -> FuseOptions:
        """Return the fusor's options for the candidate."""
        return FuseOptions(policy(self.policy), self.ratio, self.schedule)

    @property
    def measures_deviation(self) -> bool:
        """Return whether the policy scores tokens by KV deviation; otherwise the check layers are not used."""
        return policy(self.policy).needs_deviation

    def __str__(self) -> str:
        """Return the candidate in words."""
        return in_words(self.policy, self.ratio, self.schedule.check_layers if self.measures_deviation else ())


def in_words(name: str, ratio: float, check_layers: Sequence[int]) -> str:
    """Return policy, ratio and check layers in words; without ``check_layers`` the words name no layer."""
    layers = f" at layer {', '.join(map(str, check_layers))}" if check_layers else ""
    return f"{name} {ratio:.0%}{layers}" if ratio else "full KV reuse"


@dataclass(frozen=True)
class LayerFinding:
    """Holds how useful one layer is as a check layer.

    Attributes:
        layer: The layer.
        overlap: Share of the 15% of tokens that deviate most over all layers that are also in the top 15% at this
            layer.
        spearman: Rank correlation of the layer's deviation with the deviation of all layers.
        visible: Share of the tokens whose KV deviates by more than rounding at this layer. Behind a sliding window
            shorter than the chunks most tokens do not deviate, and rounding would decide among them.
        offered: Whether calibration tries the layer: it is shallow enough to pay, not blind, and better than earlier
            layers.
    """

    layer: int
    overlap: float
    spearman: float
    visible: float
    offered: bool


LayerValues = list[tuple[float, float, float]]
"""Overlap, spearman and visible (see :class:`LayerFinding`) of each layer from 1 on, in one prompt."""


def layer_values(measured: PromptMeasurement) -> LayerValues:
    """Return overlap, spearman and visible of each layer from 1 on, in one prompt."""
    return [
        (_overlap(each, measured.oracle), _correlation(each, measured.oracle), _visible(measured, layer))
        for layer, each in enumerate(measured.deviation[1:], 1)
    ]


def examine_layers(prompts: Sequence[LayerValues], num_layers: int) -> list[LayerFinding]:
    """Return the finding of each layer from 1 on, with the mean values over prompts."""
    found: list[LayerFinding] = []
    best = 0.0
    for layer in range(1, num_layers):
        overlap, correlation, visible = (float(x) for x in np.mean([each[layer - 1] for each in prompts], 0))
        # A dense pass over more than half of the layers costs more than blending saves.
        pays = layer <= max(1, num_layers // 2)
        offered = pays and visible >= RATIOS[0] and overlap >= best + (_GAIN if best else 0.0)
        best = max(best, overlap) if offered else best
        found.append(LayerFinding(layer, overlap, correlation, visible, offered))
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
        Candidate(name, ratio, schedule)
        for name in checking
        for schedule in _schedules(list(visible))
        for ratio in RATIOS
        if _sees_enough(schedule, ratio, visible)
    ]
    return sorted(found, key=lambda each: estimate_compute(each, num_layers, stale, forced))


def dense_share(schedule: BlendSchedule, ratio: float, num_layers: int) -> float:
    """Return the compute of a blend's dense passes, as a share of its stale tokens through all layers."""
    sizes = [1.0, *(min(1.0, ratio * width) for width in schedule.widths[:-1])]
    return sum(size * layer / num_layers for size, layer in zip(sizes, schedule.check_layers, strict=True))


def estimate_compute(candidate: Candidate, num_layers: int, stale: float, forced: float) -> float:
    """Return the estimated compute of a blend (dense, question's and sparse pass), as a share of a full recompute."""
    total = candidate.ratio * stale + forced
    chosen = policy(candidate.policy)
    if chosen.needs_attention:
        total += forced
    if chosen.needs_deviation:
        total += stale * dense_share(candidate.schedule, candidate.ratio, num_layers)
    return total


def _schedules(layers: Sequence[int]) -> list[BlendSchedule]:
    """Return each layer alone, and each layer followed by the deepest layer, which is the best one (gradual filtering)."""
    alone = [BlendSchedule((layer,), (1.0,)) for layer in layers]
    return alone + [BlendSchedule((layer, layers[-1]), (_WIDE, 1.0)) for layer in layers[:-1]]


def _sees_enough(schedule: BlendSchedule, ratio: float, visible: Mapping[int, float]) -> bool:
    """Return whether each check layer has at least as many visibly deviating tokens as the blend chooses at that layer."""
    pairs = zip(schedule.check_layers, schedule.widths, strict=True)
    return all(min(1.0, ratio * width) <= visible[layer] for layer, width in pairs)


def _visible(measurement: PromptMeasurement, layer: int) -> float:
    relative = measurement.relative_deviation
    eps = float(torch.finfo(torch.float32).eps) ** 2
    rounding = _ABOVE_ROUNDING * max(float(relative[0].max()), eps)
    return float((relative[layer] > rounding).float().mean())


def _correlation(deviation: torch.Tensor, oracle: torch.Tensor) -> float:
    from scipy.stats import spearmanr

    # Equal deviations have no order, so that the correlation with the oracle is 0.
    return 0.0 if float(deviation.max()) == float(deviation.min()) else float(spearmanr(deviation, oracle).statistic)


def _overlap(deviation: torch.Tensor, oracle: torch.Tensor) -> float:
    count = max(1, round(_PAPER_RATIO * len(oracle)))
    return int((highest(deviation, count) & highest(oracle, count)).sum()) / count
