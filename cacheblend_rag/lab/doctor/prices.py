"""Says where to keep a corpus's KV, and what a month costs: ``cacheblend store plan`` (paper section 5.2)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from cacheblend_rag.blending.controller import Load
from cacheblend_rag.blending.costs import Costs, TierCost
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.storage import blend_times

GIB: Final = 1 << 30
_COMPUTE: Final = "compute"
_HOUR_S: Final = 3600.0


@dataclass(frozen=True)
class TierPrice:
    """Says what a tier costs, in any currency.

    Attributes:
        gib_month: Keeping 2^30 bytes for a month.
        million_reads: A million reads of a layer; object stores count them.
        bytes_per_s: Rate of reading, for a device that was not measured here.
        latency_s: Seconds until a read's first byte, of such a device.
        at_once: How many reads of it wait side by side.
        codec: How it stores KV.

    Raises:
        InputError: A number that no device has.
    """

    gib_month: float
    million_reads: float = 0.0
    bytes_per_s: float | None = None
    latency_s: float = 0.0
    at_once: int = 1
    codec: str = "none"

    def __post_init__(self) -> None:
        """Refuse what no device costs."""
        if self.gib_month < 0 or self.million_reads < 0:
            raise InputError(f"A price is negative: {self}.")
        self.cost()

    def cost(self) -> TierCost | None:
        """Return what reading from it takes, if the file says so."""
        return None if self.bytes_per_s is None else TierCost(self.latency_s, self.bytes_per_s, self.at_once)


@dataclass(frozen=True)
class Prices:
    """Says what tiers cost, and computing.

    Attributes:
        tiers: By name.
        compute_hour: An hour of the machine that computes; None if only storage is to be counted.
    """

    tiers: Mapping[str, TierPrice]
    compute_hour: float | None = None


@dataclass(frozen=True)
class Corpus:
    """Says what is to be kept, and how often it is asked.

    Attributes:
        chunks: Number of chunks.
        chunk_bytes: Size of one's KV by the name of the codec it is stored in.
        prompts: Prompts a month.
    """

    chunks: float
    chunk_bytes: Callable[[str], int]
    prompts: float


@dataclass(frozen=True)
class PricedTier:
    """Says what keeping a corpus's KV in one tier costs.

    Attributes:
        tier: Its name.
        nbytes: Size of the KV.
        keeping: Price of keeping it for a month.
        reading: Price of a month's reads.
        computing: Price of a month's blends; None where the price of computing is not given.
        load_s: Seconds that loading a prompt's KV takes.
        recompute_s: Seconds that recomputing its share of tokens takes.
        seconds: Time to first token.
    """

    tier: str
    nbytes: float
    keeping: float
    reading: float
    computing: float | None
    load_s: float
    recompute_s: float
    seconds: float

    @property
    def delays(self) -> bool:
        """Return whether loading takes longer than recomputing."""
        return self.load_s > self.recompute_s

    @property
    def month(self) -> float:
        """Return the price of a month, all in all."""
        return self.keeping + self.reading + (self.computing or 0.0)


@dataclass(frozen=True)
class PricePlan:
    """Says where to keep a corpus's KV.

    Attributes:
        tiers: Each that has a price, cheapest first.
        cheapest: The cheapest that delays nothing; None if there is none.
        prefill_s: Seconds to the first token without any stored KV.
        prefill_month: What computing that for a month's prompts costs; None as in :class:`PricedTier`.
    """

    tiers: tuple[PricedTier, ...]
    cheapest: str | None
    prefill_s: float
    prefill_month: float | None


def read_prices(file: Path) -> Prices:
    """Read a file of prices: a table for each tier with :class:`TierPrice`'s fields, and perhaps ``[compute]`` with ``hour``.

    Raises:
        InputError: It cannot be read, or holds something else.
    """
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read the prices in {file}: {error}.") from error
    compute = data.pop(_COMPUTE, {})
    if not data or not all(isinstance(table, dict) for table in (compute, *data.values())):
        raise InputError(f'{file} has no prices. Write a table for each tier, such as [disk] with "gib_month = 0.08".')
    if set(compute) - {"hour"} or not all(_is_price(value) for value in compute.values()):
        raise InputError(f'[compute] in {file} takes one price, such as "hour = 2.5".')
    return Prices({tier: _price(file, tier, table) for tier, table in data.items()}, compute.get("hour"))


def _price(file: Path, tier: str, table: Mapping[str, Any]) -> TierPrice:
    known = [field.name for field in fields(TierPrice)]
    if unknown := sorted(set(table) - set(known)):
        raise InputError(f"[{tier}] in {file} has {', '.join(unknown)}; it takes {', '.join(known)}.")
    if "gib_month" not in table:
        raise InputError(f"[{tier}] in {file} lacks gib_month, the price of keeping a GiB for a month.")
    if wrong := sorted(name for name, value in table.items() if not _is_price(value) and name != "codec"):
        raise InputError(f"[{tier}] in {file}: {', '.join(wrong)} must be a number from 0.")
    return TierPrice(**table)


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def plan_prices(load: Load, costs: Costs, prices: Prices, corpus: Corpus) -> PricePlan:
    """Return what keeping ``corpus`` costs in each tier, and what the first token of a typical prompt then takes.

    Args:
        load: The prompt, whatever tiers it names; it is blended at its lowest ratio.
        costs: What was measured here. A tier that the prices describe is taken as they do.
        prices: Of the tiers to choose from.
        corpus: What is kept.

    Raises:
        InputError: A tier was not measured, and its prices do not say how fast it is; or it has a codec that there is not.
    """
    described = {tier: cost for tier, price in prices.tiers.items() if (cost := price.cost()) is not None}
    costs = replace(costs, tiers={**costs.tiers, **described})
    if unknown := sorted(prices.tiers.keys() - costs.tiers.keys()):
        raise InputError(
            f"How fast {', '.join(unknown)} is was not measured (measured: {', '.join(sorted(costs.tiers)) or 'none'}). "
            "Run `cacheblend store calibrate` on a store that has it, or give bytes_per_s and latency_s beside its prices."
        )

    def computing(seconds: float) -> float | None:
        return None if prices.compute_hour is None else corpus.prompts * seconds / _HOUR_S * prices.compute_hour

    found = []
    for tier, price in prices.tiers.items():
        chunk_bytes = corpus.chunk_bytes(price.codec)
        stored = replace(load, spans=[replace(span, nbytes=chunk_bytes) for span in load.spans])
        times = blend_times(stored, costs, tier)
        nbytes = corpus.chunks * chunk_bytes
        reads = corpus.prompts * len(load.spans) * costs.layers
        paid = nbytes / GIB * price.gib_month, reads / 1e6 * price.million_reads, computing(times.compute_s)
        found.append(PricedTier(tier, nbytes, *paid, times.load_s, times.compute_s, times.seconds))
    prefill_s = costs.compute.seconds(load.tokens, load.tokens)
    ordered = tuple(sorted(found, key=lambda tier: tier.month))
    cheapest = next((tier.tier for tier in ordered if not tier.delays), None)
    return PricePlan(ordered, cheapest, prefill_s, computing(prefill_s))
