"""Holds what the fusor is told of one blend: by which policy, ratio and check layers, and how long it may wait."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from cacheblend_rag.blending.policies import possible
from cacheblend_rag.blending.policies.base import SelectionPolicy
from cacheblend_rag.blending.settings import ResolvedSettings
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.errors import InputError

MOST = 0.6
"""The highest ratio that ``"auto"`` chooses: as far as calibration looks."""
_SPREADS = 2.0


@dataclass(frozen=True)
class TextRange:
    """Says for which text a profile's ratio holds.

    Attributes:
        left_out: Mean share of static deviation that the ratio left out in the prompts of the calibration.
        spread: Its standard deviation over them.

    Raises:
        InputError: They are no shares.
    """

    left_out: float
    spread: float

    def __post_init__(self) -> None:
        for value in (self.left_out, self.spread):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"A profile's text range has {value!r}; both numbers are shares from 0 to 1.")

    @property
    def most_left_out(self) -> float:
        """Return what is still like the prompts of the calibration."""
        return min(1.0, self.left_out + _SPREADS * self.spread)


@dataclass(frozen=True)
class TextRatio:
    """Chooses a prompt's ratio by its text: a higher one for another kind than the profile was calibrated on.

    Under ``ratio="auto"`` this is the lowest ratio; the loading controller (:mod:`cacheblend_rag.blending.controller`) may
    raise it. What a ratio leaves out is the share of the prompt's static deviation outside the tokens of highest static
    deviation. It is known before anything is computed, and it tells kinds of text apart: the tokens that depend on their
    context are few in some texts, many in others. It says how far a prompt is from those that were calibrated on, not that
    its answer will be right.

    Attributes:
        least: The lowest ratio: the profile's, which holds for text like the calibration's.
        left_out: Most static deviation that may be left out, as a share of the prompt's.
        most: The highest ratio.
    """

    least: float
    left_out: float
    most: float = MOST

    def __post_init__(self) -> None:
        for value in (self.least, self.left_out, self.most):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"ratio='auto' was given {value!r}; its limits are shares from 0 to 1.")

    def choose(self, static: torch.Tensor) -> float:
        """Return the smallest ratio that leaves out no more than allowed; ``static`` is ``[candidates]``."""
        if not len(static):
            return self.least
        # Descending from 1, at no tokens, to 0: as many counts leave out too much as tokens are needed.
        count = int((left_out_by_count(static) > self.left_out).sum())
        return min(max(self.least, count / len(static)), max(self.least, self.most))


def raised(ratio: float | TextRatio, least: float) -> float | TextRatio:
    """Return a ratio, or the rule that chooses it, that is no lower than ``least``."""
    return replace(ratio, least=max(ratio.least, least)) if isinstance(ratio, TextRatio) else max(ratio, least)


def left_out_by_count(static: torch.Tensor) -> torch.Tensor:
    """Return the share of ``static``, ``[candidates]``, outside its ``n`` highest values, for ``n`` from 0 on, in fp64."""
    # On the CPU, so that every rank adds up alike.
    ranked = static.detach().double().cpu().sort(descending=True).values
    covered = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)])
    if not covered[-1] > 0:
        return torch.zeros_like(covered)  # where nothing depends on its context, nothing is left out
    return (1 - covered / covered[-1]).clamp(0, 1)


def left_out(static: torch.Tensor, ratio: float) -> float:
    """Return the share of ``static``, ``[candidates]``, outside the tokens that ``ratio`` covers, those of highest value."""
    return float(left_out_by_count(static)[round(ratio * len(static))])


@dataclass(frozen=True)
class BlendSchedule:
    """Says at which layers to measure KV deviation, and how many tokens to keep there.

    Attributes:
        check_layers: Ascending layer indices.
        widths: For each check layer, the set's size as a multiple of the recompute ratio; the last is 1.
    """

    check_layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = (1.0,)

    def dense_share(self, ratio: float, num_layers: int) -> float:
        """Return what the dense passes of a blend compute, as a share of its stale tokens through all layers."""
        sizes = [1.0, *(min(1.0, ratio * width) for width in self.widths[:-1])]
        return sum(size * layer / num_layers for size, layer in zip(sizes, self.check_layers, strict=True))


@dataclass(frozen=True)
class FuseOptions:
    """Says how one prompt is blended; :meth:`~cacheblend_rag.blending.profile.ModelProfile.options` makes one of settings.

    Attributes:
        policy: Chooses the tokens to recompute. Where it cannot (a chunk has no static deviation, a model's attention cannot be
            watched), it gives way to the policy it names for that, at a ratio as much higher as that one needs.
        ratio: Recompute ratio, of the tokens with stale KV; 0 is full KV reuse, 1 equals the full prefill. Or the rule that
            chooses it by the chunks' static deviations; where one has none, it is the lowest that the rule allows.
        schedule: Check layers, for policies that measure KV deviation.
        trace: Where to record when each layer is loaded and computed; None for nowhere.
        most_wait_s: How long the computation may wait for stored KV, in all; None for as long as it takes.
        whole: Begin with a segment that waits until all stored KV is in host memory. An engine that goes on earlier computes
            layer by layer behind the loading, as without it.
    """

    policy: SelectionPolicy
    ratio: float | TextRatio
    schedule: BlendSchedule = BlendSchedule()
    trace: Trace | None = None
    most_wait_s: float | None = None
    whole: bool = False

    @property
    def watches_question(self) -> bool:
        """Return whether what is recomputed may depend on what is asked."""
        wanted = self.policy
        return wanted.needs_attention or possible(wanted, ranked=False, watched=True).needs_attention


def blend_terms(settings: ResolvedSettings, options: FuseOptions) -> dict[str, Any]:
    """Return all that decides how a prompt's chunks are blended, as JSON values.

    Of the loading controller's costs nothing is in it: whatever it decides recomputes as much as was asked for, or more.
    """
    ratio = options.ratio
    return {
        "reuse": settings.reuse,
        "policy": options.policy.name,
        "ratio": [settings.ratio, asdict(ratio) if isinstance(ratio, TextRatio) else ratio],
        "schedule": asdict(options.schedule),
    }
