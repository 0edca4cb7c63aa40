"""Draws figures of KV deviation: 7 (its distribution over tokens), 8 (agreement of neighbouring layers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from scipy.stats import spearmanr

from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row, Say
from cacheblend_lab.plotting import draw_points, figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_QUANTILES: Final = tuple(q / 100 for q in (*range(0, 80, 5), *range(80, 101)))
_TOP: Final = 0.15


def _measure_kv(context: FigureContext, say: Say) -> list[Row]:
    deviations = []
    for number, inspector in enumerate(context.inspectors):
        say(number / len(context.inspectors), f"prompt {number + 1} of {len(context.inspectors)}")
        deviations.append(inspector.measure_deviation())
    together = torch.cat(deviations, dim=1)
    rows = []
    for layer in range(1, len(together)):
        values = together[layer].double().sqrt()
        share = values.sort(descending=True).values[: round(_TOP * len(values))].sum() / values.sum().clamp_min(1e-30)
        for quantile, value in zip(_QUANTILES, np.quantile(values.numpy(), _QUANTILES), strict=True):
            rows.append(
                {
                    "layer": layer,
                    "quantile": quantile,
                    "kv_deviation": float(value),
                    "kv_deviation_relative": float(value / values.mean()),
                    "share_of_top_15_percent": float(share),
                }
            )
    return rows


def _draw_kv(rows: Sequence[Row]) -> Drawing:
    layers = sorted({row["layer"] for row in rows})
    with figure(8.0, 3.4, columns=2) as (made, (left, right)):
        from matplotlib import colormaps

        shown = sorted({layers[0], layers[1 % len(layers)], layers[len(layers) // 2], layers[-1]})
        for index, layer in enumerate(shown):
            mine = [row for row in rows if row["layer"] == layer]
            left.plot(
                [100 * row["quantile"] for row in mine],
                [row["kv_deviation_relative"] for row in mine],
                color=colormaps["viridis"](0.1 + 0.75 * index / max(1, len(shown) - 1)),
                linestyle=("-", "--", "-.", ":")[index],
                label=f"layer {layer}",
            )
        left.axvspan(100 * (1 - _TOP), 100, color="#0072B2", alpha=0.08, linewidth=0)
        left.set_xlabel("percentile of tokens by KV deviation")
        left.set_ylabel("KV deviation (L2), times the layer's mean")
        left.legend()
        shares = [next(row["share_of_top_15_percent"] for row in rows if row["layer"] == layer) for layer in layers]
        right.bar(layers, [100 * share for share in shares], color=style("blend")["color"], width=0.7)
        right.axhline(100 * _TOP, color="#D55E00", linewidth=1.2, linestyle="--", label="if all tokens deviated alike")
        right.legend()
        right.grid(axis="x", visible=False)
        right.set_ylim(0, 100)
        right.set_xlabel("layer")
        right.set_ylabel("% of deviation in the top 15%")
        return made


def _measure_correlation(context: FigureContext, say: Say) -> list[Row]:
    rows = []
    for number, inspector in enumerate(context.inspectors):
        say(number / len(context.inspectors), f"prompt {number + 1} of {len(context.inspectors)}")
        deviation = inspector.measure_deviation()
        tops = [set(layer.argsort(descending=True)[: round(_TOP * len(layer))].tolist()) for layer in deviation]
        for layer in range(1, len(deviation) - 1):
            rows.append(
                {
                    "prompt": number,
                    "layer": layer,
                    "spearman": float(spearmanr(deviation[layer], deviation[layer + 1]).statistic),
                    "overlap_of_top_15_percent": len(tops[layer] & tops[layer + 1]) / max(1, len(tops[layer])),
                }
            )
    return rows


def _draw_correlation(rows: Sequence[Row]) -> Drawing:
    layers = sorted({row["layer"] for row in rows})
    with figure(6.2, 3.4) as (made, axes):
        for name, key, look in (
            ("Spearman's rank correlation", "spearman", "blend"),
            ("overlap of the top 15%", "overlap_of_top_15_percent", "reuse"),
        ):
            by_layer = [[row[key] for row in rows if row["layer"] == layer] for layer in layers]
            interval = ([min(v) for v in by_layer], [max(v) for v in by_layer])
            draw_points(axes, look, name, layers, [float(np.mean(v)) for v in by_layer], interval)
        axes.set_xticks(layers, [f"{layer}–{layer + 1}" for layer in layers])
        if len(layers) > 16:
            axes.set_xticks(layers[:: len(layers) // 8], [f"{n}–{n + 1}" for n in layers[:: len(layers) // 8]])
        axes.set_ylim(min(0, *(row["spearman"] for row in rows)), 1.02)
        axes.set_xlabel("layers compared")
        axes.legend(loc="lower right")
        return made


FIGURES: Final = (
    Figure(
        7,
        "Distribution of the KV deviation over tokens",
        "Some 10 to 15% of the tokens deviate much more than the rest.",
        "Stored KV at its place against the full prefill's, K and V together, six prompts; layer 0 has none.",
        _measure_kv,
        _draw_kv,
        0.3,
    ),
    Figure(
        8,
        "Agreement of neighbouring layers on the tokens that deviate",
        "The rank correlation between one layer's KV deviation and the next one's is consistently high.",
        "Mean over six prompts; bands reach from the lowest to the highest of them.",
        _measure_correlation,
        _draw_correlation,
        0.3,
    ),
)
