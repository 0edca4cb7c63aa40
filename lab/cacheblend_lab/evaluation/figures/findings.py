"""Writes one sentence per figure about the findings of this run, to compare with the findings of the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Final

from cacheblend_lab.evaluation.figures.base import Row


def _by_method(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["method"]: row for row in rows}


def _counts(rows: Sequence[Row]) -> str:
    most = max(row["chunks"] for row in rows)
    last = _by_method([row for row in rows if row["chunks"] == most])
    scores = ", ".join(f"{last[name]['label']} {last[name]['quality']:.2f}" for name in ("full", "reuse", "blend"))
    return f"{last['full']['score']} with {most} chunks: {scores}."


def _deviation(rows: Sequence[Row]) -> str:
    def lowered(policy: str, ratio: float) -> float:
        at = {
            r: mean(row["attention_deviation"] for row in rows if (row["policy"], row["ratio"]) == (policy, r))
            for r in (0.0, ratio)
        }
        return 1 - at[ratio] / at[0.0] if at[0.0] else 0.0

    policies = list(dict.fromkeys(row["policy"] for row in rows))
    between = sorted({row["ratio"] for row in rows if 0 < row["ratio"] < 1})
    ratio = min(between, key=lambda r: abs(r - 0.15))
    return (
        f"Recomputing {ratio:.0%} lowers the attention deviation by "
        + ", ".join(f"{lowered(policy, ratio):.0%} ({policy})" for policy in policies)
        + "."
    )


def _kv(rows: Sequence[Row]) -> str:
    shares = {row["layer"]: row["share_of_top_15_percent"] for row in rows if row["layer"] > 0}
    return f"The 15% that deviate most hold {min(shares.values()):.0%} to {max(shares.values()):.0%} of a layer's KV deviation."


def _correlation(rows: Sequence[Row]) -> str:
    layers = sorted({row["layer"] for row in rows})
    means = [mean(row["spearman"] for row in rows if row["layer"] == layer) for layer in layers]
    overlaps = [mean(row["overlap_of_top_15_percent"] for row in rows if row["layer"] == layer) for layer in layers]
    return (
        f"Rank correlation {min(means):.2f} to {max(means):.2f}; neighbours share {min(overlaps):.0%} to {max(overlaps):.0%} of "
        "their highest 15%."
    )


def _ttft(rows: Sequence[Row]) -> str:
    by = _by_method(rows)
    full, reuse, blend = by["full"], by["reuse"], by["blend"]
    return (
        f"The blend's first token comes {full['ttft_median_s'] / blend['ttft_median_s']:.1f} times as soon as full recompute's; "
        f"it takes {blend['ttft_median_s'] / reuse['ttft_median_s']:.1f} times full KV reuse's time. Its {full['score']} is "
        f"{blend['quality'] - full['quality']:+.2f} against full recompute and {blend['quality'] - reuse['quality']:+.2f} "
        "against full KV reuse."
    )


def _chunkwise(rows: Sequence[Row]) -> str:
    by = _by_method(rows)
    blend = by["blend"]
    return (
        "; ".join(
            f"{by[name]['label']}: TTFT {by[name]['ttft_median_s'] / blend['ttft_median_s']:.1f} times the blend's, "
            f"{blend['score']} {by[name]['quality'] - blend['quality']:+.2f}"
            for name in ("map_reduce", "map_rerank")
        )
        + "."
    )


def _rates(rows: Sequence[Row]) -> str:
    most = {row["method"]: row["capacity"] for row in rows}
    return (
        f"The most that can be served is {most['blend'] / most['full']:.1f} times full recompute's with the blend, and "
        f"{most['prefix'] / most['full']:.1f} times with prefix caching."
    )


def _sizes(rows: Sequence[Row]) -> str:
    points = {(row["panel"], row["x"]) for row in rows}
    gains = [
        at["full"]["ttft_s"] / at["blend"]["ttft_s"]
        for panel, x in points
        if (at := _by_method([row for row in rows if (row["panel"], row["x"]) == (panel, x)]))
    ]
    return f"The blend is {min(gains):.1f} to {max(gains):.1f} times as soon as full recompute over all points."


def _ratios(rows: Sequence[Row]) -> str:
    full = _by_method(rows)["full"]
    near = min((row for row in rows if 0 < row["ratio"] < 1), key=lambda row: abs(row["ratio"] - 0.15))
    # Full recompute is among the ratios, so that at least one ratio is within the limit.
    within = {row["ratio"]: abs(row["quality"] - full["quality"]) <= _LOSS for row in rows}
    least = min(ratio for ratio in within if all(near for other, near in within.items() if other >= ratio))
    return (
        f"At {near['ratio']:.0%} the {full['score']} is {near['quality'] - full['quality']:+.2f} against full recompute, "
        f"{full['ttft_median_s'] / near['ttft_median_s']:.1f} times as soon; from {least:.0%} on it is within {_LOSS}."
    )


def _choices(rows: Sequence[Row]) -> str:
    points = [_by_method([row for row in rows if row["bytes_per_s"] == rate]) for rate in _rates_of(rows)]
    blends = [point["blend"] for point in points]
    behind = max(row["ttft_s"] / max(row["load_s"], row["recompute_s"]) for row in blends)
    free = [row["bytes_per_s"] for row in blends if row["load_s"] <= row["recompute_s"]]
    place = f"From {min(free) / 1e9:g} GB/s on a device adds no delay" if free else "Every device adds delay"
    late = max(at["controller"]["ttft_s"] / min(at["blend"]["ttft_s"], at["full"]["ttft_s"]) for at in points)
    shares = [at["controller"]["computed_tokens"] / at["controller"]["prompt_tokens"] for at in points]
    return (
        f"{place}; the blend takes at most {behind:.2f} times the longer of loading and recomputing. The controller computes "
        f"{max(shares):.0%} to {min(shares):.0%} of the prompt, and takes at most {late:.2f} times the sooner of blend and full "
        "recompute."
    )


def _rates_of(rows: Sequence[Row]) -> list[float]:
    return sorted({row["bytes_per_s"] for row in rows})


def _devices(rows: Sequence[Row]) -> str:
    speeds = _rates_of(rows)
    ends = []
    for speed in (speeds[0], speeds[-1]):
        at = _by_method([row for row in rows if row["bytes_per_s"] == speed])
        ends.append(
            f"{at['blend']['ttft_s'] / at['reuse']['ttft_s']:.1f} times full KV reuse's at {speed / 1e9:g} GB/s"
        )
    return f"The blend's TTFT is {' and '.join(ends)}."


# Loss of quality that the paper calls negligible.
_LOSS: Final = 0.02
FINDINGS: Final[Mapping[int, Callable[[Sequence[Row]], str]]] = {
    2: _counts,
    6: _deviation,
    7: _kv,
    8: _correlation,
    10: _choices,
    12: _ttft,
    13: _chunkwise,
    14: _rates,
    15: _sizes,
    16: _ratios,
    17: _devices,
}
"""Functions that write a figure's finding, by the figure's number. Figure 4 has no finding in words."""
