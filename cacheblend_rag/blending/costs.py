"""Holds the costs of loading and computing on this machine, for the loading controller (paper section 5).

``cacheblend store calibrate`` measures the costs and saves them among the user's files, named by model, device and
engine. Before calibration, an engine estimates them from the times of the parity gate's own passes. While an engine
runs, the times of real prompts update both kinds of costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import ceil, isfinite
from typing import Any, Self

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.events import TierReads

_WEIGHT = 0.2
"""Least weight of the newest observation in the average: about ten prompts decide."""
_MOST_STEP = 4.0
"""Most times slower or faster than expected that one observation counts: one slow read does not mean a new device."""
_ATTENTION = 2.0
"""Factor by which attention takes longer than the products with the weights, for the same number of operations."""
_WATCHED = 4.0
"""Factor by which attention takes longer where it is measured: the question's pass over 1,300 tokens on two CPU cores."""
_PLACING = 0.01
"""Cost of placing a stored token, as a share of the cost of computing one."""


@dataclass(frozen=True)
class TierCost:
    """Holds the cost of reading from one tier.

    Attributes:
        latency_s: Seconds until a read's first byte.
        bytes_per_s: Total rate of all reads after their first byte.
        at_once: Number of reads that can wait for their first byte at the same time.

    Raises:
        InputError: A number is out of range.
    """

    latency_s: float
    bytes_per_s: float
    at_once: int = 1

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and isfinite(self.latency_s) and self.bytes_per_s > 0 and self.at_once >= 1):
            raise InputError(f"{self} describes no device: latency from 0, rate above 0, at least 1 read at once.")

    def seconds(self, nbytes: float, reads: int) -> float:
        """Return the seconds for ``reads`` reads of ``nbytes`` bytes in total."""
        return ceil(reads / self.at_once) * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class ComputeCost:
    """Holds the cost of a pass of some tokens through all layers, and of placing the stored KV of other tokens.

    Attributes:
        fixed_s: Seconds of a pass of no tokens: launching, reading the weights.
        per_token_s: Seconds per token.
        per_pair_s: Seconds for each of ``tokens * context`` pairs. A causal pass computes half of the pairs; the number
            allows for that.
        per_placed_s: Seconds for each stored token: rotating its keys and writing its KV into the KV cache.

    Raises:
        InputError: A number is negative or not finite, or all except ``per_placed_s`` are 0.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float
    per_placed_s: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.fixed_s, self.per_token_s, self.per_pair_s)
        if not all(part >= 0 and isfinite(part) for part in (*parts, self.per_placed_s)) or not any(parts):
            raise InputError(f"{self} describes no model: a pass takes time, and none of its parts is negative.")

    def seconds(self, tokens: float, context: float, placed: int = 0, passes: float = 1.0, watched: int = 0) -> float:
        """Return the seconds to compute ``tokens`` tokens in a prompt of ``context``, with ``placed`` stored tokens.

        ``passes`` is the number of passes, and ``watched`` the number of the tokens whose attention is measured.
        """
        if not tokens:
            return placed * self.per_placed_s
        pairs = (tokens + (_WATCHED - 1) * watched) * context
        return passes * self.fixed_s + tokens * self.per_token_s + pairs * self.per_pair_s + placed * self.per_placed_s

    def expected(self, work: Computed) -> float:
        """Return the seconds that ``work`` should take."""
        return self.seconds(work.tokens, work.context, work.placed, work.passes, work.watched)

    @classmethod
    def of_model(cls, pass_s: float, token_s: float, config: Any) -> Self:
        """Return the cost of a model from the times of short passes and from its shape (a Hugging Face ``config``).

        Args:
            pass_s: Seconds of a pass of almost no tokens.
            token_s: Seconds that each token adds to a pass, in a short prompt.
            config: Shape of the model, to estimate the cost of attention relative to the weights: ``hidden_size``,
                ``num_hidden_layers`` and related fields.
        """
        hidden = float(config.hidden_size)
        heads = float(config.num_attention_heads)
        attended = heads * float(getattr(config, "head_dim", None) or hidden / heads)
        shared = float(getattr(config, "num_key_value_heads", None) or heads) / heads
        experts = float(getattr(config, "num_experts_per_tok", None) or 1)
        inner = float(
            getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
        )
        weights = hidden * (2 * attended * (1 + shared) + 3 * inner * experts)
        # Attention takes two products per pair of tokens. A causal pass makes half of them, by code that is slower than
        # the code for the weights.
        return cls(pass_s, token_s, _ATTENTION * token_s * attended / weights, _PLACING * token_s)

    def scaled(self, factor: float) -> ComputeCost:
        """Return the cost on a machine that takes ``factor`` times as long."""
        return ComputeCost(*(part * factor for part in astuple(self)))


@dataclass(frozen=True)
class Computed:
    """Holds the time of computing one prompt, or one step of an engine.

    Attributes:
        tokens: Number of tokens that went through all layers; a pass through some layers counts by its share.
        context: Length of the prompt that the tokens belong to.
        seconds: Time without the waits for stored KV.
        placed: Number of tokens whose stored KV was placed.
        passes: Number of passes; a pass through some layers counts by its share.
        watched: Number of the tokens whose attention was measured.
    """

    tokens: float
    context: float
    seconds: float
    placed: int = 0
    passes: float = 1.0
    watched: int = 0


@dataclass(frozen=True)
class MeasuredCost:
    """Holds one run's times, to correct the costs: computations, reads by tier, and seconds waited for reads."""

    computed: Sequence[Computed] = ()
    reads: Mapping[str, TierReads] = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Holds the costs of one model on one machine.

    Attributes:
        layers: Number of the model's layers: loading and computing overlap layer by layer.
        compute: Cost of computing.
        tiers: Cost of loading, by tier.
        calibrated: Whether ``store calibrate`` measured the costs. Otherwise they come from short passes, and no tier's
            cost is known at first.
        computations: Number of computations that have corrected the costs. The first one replaces an estimate from
            short passes, which one stall of the machine can falsify by any factor.
    """

    layers: int
    compute: ComputeCost
    tiers: Mapping[str, TierCost]
    calibrated: bool = True
    computations: int = 0

    @classmethod
    def of_model(cls, pass_s: float, token_s: float, config: Any) -> Self:
        """Return the costs before calibration; see :meth:`ComputeCost.of_model`."""
        return cls(int(config.num_hidden_layers), ComputeCost.of_model(pass_s, token_s, config), {}, calibrated=False)

    def after(self, measured: MeasuredCost) -> Costs:
        """Return the costs corrected by the times of one run."""
        costs = self
        for took in measured.computed:
            costs = costs.computed(took)
        for tier, reads in measured.reads.items():
            costs = costs.loaded(tier, reads, measured.waited_s)
        return costs

    def computed(self, took: Computed) -> Costs:
        """Return the costs corrected by one computation."""
        weight = _WEIGHT if self.calibrated else max(_WEIGHT, 1 / (1 + self.computations))
        drift = _drift(took.seconds, self.compute.expected(took), weight)
        return replace(self, compute=self.compute.scaled(drift), computations=self.computations + 1)

    def prefill_s(self, tokens: float, context: float, computed: Sequence[Computed]) -> float:
        """Return the seconds of a prefill of ``tokens`` tokens, at the speed at which ``computed`` ran.

        The costs give only the proportion between both; so a machine that is busy, or was busy when the costs were
        measured, does not distort the comparison of a blend with the prefill.
        """
        expected = sum(map(self.compute.expected, computed))
        speed = sum(took.seconds for took in computed) / expected if expected > 0 else 1.0
        return self.compute.seconds(tokens, context) * speed

    def loaded(self, tier: str, reads: TierReads, waited_s: float) -> Costs:
        """Return the costs corrected by reads from ``tier``, for which the computation waited ``waited_s``.

        Reads that run beside the computation compete with it for the processor and have time to spare. So only reads
        that the computation waited for can make a tier's cost rise. A tier that was unknown gets a cost from its first
        reads.
        """
        known = self.tiers.get(tier)
        if known is None:
            if not (reads.nbytes > 0 and reads.seconds > 0):
                return self
            new = TierCost(0.0, reads.nbytes / reads.seconds)
        else:
            expected = known.seconds(reads.nbytes, reads.count)
            factor = _drift(min(reads.seconds, expected + waited_s), expected)
            new = replace(known, latency_s=known.latency_s * factor, bytes_per_s=known.bytes_per_s / factor)
        return replace(self, tiers={**self.tiers, tier: new})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the costs from ``data``, the result of :func:`dataclasses.asdict`.

        Raises:
            InputError: ``data`` is malformed.
        """
        try:
            tiers = {str(name): TierCost(**tier) for name, tier in data["tiers"].items()}
            return cls(int(data["layers"]), ComputeCost(**data["compute"]), tiers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"These are no measured costs ({error!r}); run `cacheblend store calibrate` anew."
            ) from error


def _drift(seconds: float, expected: float, weight: float = _WEIGHT) -> float:
    """Return the factor by which to correct an expected time after one observation; one of weight 1 replaces the time."""
    if not (seconds > 0 and expected > 0):
        return 1.0
    seen = seconds / expected
    if weight < 1:
        seen = min(max(seen, 1 / _MOST_STEP), _MOST_STEP)
    return (1 - weight) + weight * seen
