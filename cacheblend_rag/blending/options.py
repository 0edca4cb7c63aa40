"""Holds what the fusor is told of one blend: by which policy, ratio and check layers, and how long it may wait."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.blending.policies.base import SelectionPolicy
from cacheblend_rag.blending.text_ratio import TextRatio
from cacheblend_rag.blending.trace import Trace


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
        policy: Chooses the tokens to recompute. Where a chunk has no static deviation, one that needs it gives way to the policy
            it names for that.
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
