"""Holds what loading and computing cost on this machine, for the loading controller (paper section 5).

``cacheblend store calibrate`` measures the costs and keeps them among the user's files, named by model, device and engine. Before
that, an engine knows what the parity gate's own passes took. While an engine runs, what real prompts take keeps both current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import ceil, isfinite
from typing import Any, Self

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.events import TierReads

_WEIGHT = 0.2
"""Of the newest observation in the exponentially weighted average: some ten prompts decide."""
_MOST_STEP = 4.0
"""One observation counts as at most so many times slower or faster than expected: a hiccup is no new device."""
_ATTENTION = 2.0
"""How many times longer attention takes than the products with the weights, for as many operations."""
_PLACING = 0.01
"""Cost of placing a stored token, as a share of the cost of computing one."""


@dataclass(frozen=True)
class TierCost:
    """Says what reading from one tier costs.

    Attributes:
        latency_s: Seconds until a read's first byte.
        bytes_per_s: Rate of all reads together from then on.
        at_once: How many reads wait for their first byte side by side.

    Raises:
        InputError: A number that no device has.
    """

    latency_s: float
    bytes_per_s: float
    at_once: int = 1

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and isfinite(self.latency_s) and self.bytes_per_s > 0 and self.at_once >= 1):
            raise InputError(f"{self} describes no device: latency from 0, rate above 0, at least 1 read at once.")

    def seconds(self, nbytes: float, reads: int) -> float:
        """Return the time ``reads`` reads of ``nbytes`` together take."""
        return ceil(reads / self.at_once) * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class ComputeCost:
    """Says what a pass of some tokens through all layers costs, and placing what is stored of the others.

    Attributes:
        fixed_s: Seconds of a pass of no tokens: launching, reading the weights.
        per_token_s: Seconds a token.
        per_pair_s: Seconds for each of ``tokens * context`` pairs; a causal pass computes half of them, which this allows for.
        per_placed_s: Seconds for each stored token: to rotate its keys and to write its KV where it is attended to.

    Raises:
        InputError: One is negative, or all but the last are 0.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float
    per_placed_s: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.fixed_s, self.per_token_s, self.per_pair_s)
        if not all(part >= 0 and isfinite(part) for part in (*parts, self.per_placed_s)) or not any(parts):
            raise InputError(f"{self} describes no model: a pass takes time, and none of its parts is negative.")

    def seconds(self, tokens: float, context: float, placed: int = 0) -> float:
        """Return the time of ``tokens`` tokens in a prompt of ``context``, of which ``placed`` are stored; none take none."""
        passed = self.fixed_s + tokens * (self.per_token_s + self.per_pair_s * context) if tokens else 0.0
        return passed + placed * self.per_placed_s

    @classmethod
    def of_model(cls, pass_s: float, token_s: float, config: Any) -> Self:
        """Return the cost of a model by what short passes took, and by its shape (a Hugging Face ``config``).

        Args:
            pass_s: Seconds of a pass of next to no tokens.
            token_s: Seconds that each token adds to a pass, in a short prompt.
            config: Says how much attention costs beside the weights: ``hidden_size``, ``num_hidden_layers`` and the like.
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
        # Two products a pair of tokens, half of which a causal pass makes, by code that is slower than that of the weights.
        return cls(pass_s, token_s, _ATTENTION * token_s * attended / weights, _PLACING * token_s)

    def scaled(self, factor: float) -> ComputeCost:
        """Return the cost on a machine that takes ``factor`` times as long."""
        return ComputeCost(*(part * factor for part in astuple(self)))


@dataclass(frozen=True)
class Computed:
    """Says what the computing of one prompt, or of one step of an engine, took.

    Attributes:
        tokens: How many went through all layers; of a pass through some of them, that share.
        context: Length of the prompt they stand in.
        seconds: Without what was waited for stored KV.
        placed: How many tokens of stored KV were placed.
    """

    tokens: float
    context: float
    seconds: float
    placed: int = 0


@dataclass(frozen=True)
class MeasuredCost:
    """Says what a run took, to correct the costs by: each computation, its reads by tier, the seconds that it waited for them."""

    computed: Sequence[Computed] = ()
    reads: Mapping[str, TierReads] = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Holds the costs of one model on one machine.

    Attributes:
        layers: Number of the model's layers: loading and computing overlap layer by layer.
        compute: Of computing.
        tiers: Of loading, by tier.
        calibrated: Whether ``store calibrate`` measured them; else short passes did, and nothing is known of tiers at first.
    """

    layers: int
    compute: ComputeCost
    tiers: Mapping[str, TierCost]
    calibrated: bool = True

    @classmethod
    def of_model(cls, pass_s: float, token_s: float, config: Any) -> Self:
        """Return the costs before any are calibrated; see :meth:`ComputeCost.of_model`."""
        return cls(int(config.num_hidden_layers), ComputeCost.of_model(pass_s, token_s, config), {}, calibrated=False)

    def after(self, measured: MeasuredCost) -> Costs:
        """Return the costs corrected by what a run took."""
        costs = self
        for took in measured.computed:
            costs = costs.computed(took)
        for tier, reads in measured.reads.items():
            costs = costs.loaded(tier, reads, measured.waited_s)
        return costs

    def computed(self, took: Computed) -> Costs:
        """Return the costs after a computation."""
        drift = _drift(took.seconds, self.compute.seconds(took.tokens, took.context, took.placed))
        return replace(self, compute=self.compute.scaled(drift))

    def loaded(self, tier: str, reads: TierReads, waited_s: float) -> Costs:
        """Return the costs after reads from ``tier``, for which the computation waited ``waited_s``.

        Reads that hide behind the computation have it as a rival for the processor, and time to spare: what nobody waited for
        does not make a device slow. A tier unknown so far is known from then on.
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
        """Return the costs of which ``data`` is what :func:`dataclasses.asdict` gives.

        Raises:
            InputError: They are not such data.
        """
        try:
            tiers = {str(name): TierCost(**tier) for name, tier in data["tiers"].items()}
            return cls(int(data["layers"]), ComputeCost(**data["compute"]), tiers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"These are no measured costs ({error!r}); run `cacheblend store calibrate` anew."
            ) from error


def _drift(seconds: float, expected: float) -> float:
    """Return by which factor to correct an expectation after one observation."""
    if not (seconds > 0 and expected > 0):
        return 1.0
    seen = min(max(seconds / expected, 1 / _MOST_STEP), _MOST_STEP)
    return (1 - _WEIGHT) + _WEIGHT * seen
