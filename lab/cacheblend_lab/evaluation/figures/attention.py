"""Draws figures of attention and KV deviation: 4, 6 (the question's attention), 7 (deviation over tokens), 8 (layers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from scipy.stats import spearmanr

from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row, Say
from cacheblend_lab.plotting import draw_points, figure, style
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions

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


_RATIOS: Final = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
_BINS: Final = 160


def _measure_attention(context: FigureContext, say: Say) -> list[Row]:
    inspector = context.inspectors[0]
    whole = inspector.measure_attention(FuseOptions(policy("full-recompute"), 1.0))
    say(0.4, "attention after full KV reuse")
    reuse = inspector.measure_attention(FuseOptions(policy("full-reuse"), 0.0))
    say(0.7, "attention after the blend")
    blend = inspector.measure_attention(context.blend)
    layer = int(attention_deviation(reuse, whole).argmax())
    rows = []
    for name, attention in (("full", whole), ("reuse", reuse), ("blend", blend)):
        binned = _binned(attention[layer].mean(0))
        starts = torch.linspace(0, attention.shape[3], binned.shape[1] + 1)[:-1].long()
        for query, values in enumerate(binned.tolist()):
            rows += [
                {"method": name, "layer": layer, "query": query, "key": int(start), "attention": value}
                for start, value in zip(starts, values, strict=True)
            ]
    return rows


def _binned(attention: torch.Tensor) -> torch.Tensor:
    """Return ``[question, bins]``, the highest weight among each bin's keys; means would hide single tokens."""
    edges = torch.linspace(0, attention.shape[1], min(_BINS, attention.shape[1]) + 1).long()
    return torch.stack([attention[:, a:b].amax(1) for a, b in pairwise(edges.tolist())], dim=1)


def _draw_attention(rows: Sequence[Row]) -> Drawing:
    labels = {"full": "full recompute", "reuse": "full KV reuse", "blend": "blend"}
    with figure(8.2, 4.6, rows=3) as (made, all_axes):
        top = max(row["attention"] for row in rows)
        image: Any = None
        for axes, (name, label) in zip(all_axes, labels.items(), strict=True):
            mine = [row for row in rows if row["method"] == name]
            keys = sorted({row["key"] for row in mine})
            matrix = np.array([row["attention"] for row in mine]).reshape(-1, len(keys))
            image = axes.imshow(
                np.sqrt(matrix),
                aspect="auto",
                cmap="magma_r",
                vmin=0,
                vmax=top**0.5,
                extent=(0, keys[-1] + (keys[1] - keys[0] if len(keys) > 1 else 1), len(matrix), 0),
                interpolation="nearest",
            )
            axes.grid(visible=False)
            axes.set_title(label)
            axes.set_ylabel("question")
            if name != "blend":
                axes.set_xticklabels([])
        all_axes[-1].set_xlabel("position of the attended token in the prompt")
        bar = made.colorbar(image, ax=list(all_axes), shrink=0.8)
        ticks = [0, *(t for t in (0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if t <= top)]
        bar.set_ticks([t**0.5 for t in ticks], labels=[f"{t:g}" for t in ticks])
        bar.set_label("attention weight")
        return made


def _measure_deviation(context: FigureContext, say: Say) -> list[Row]:
    compared = (context.blend.policy.name, "random")
    found: dict[tuple[str, float], list[Any]] = {}
    steps = len(context.inspectors)
    for number, inspector in enumerate(context.inspectors):
        want = inspector.measure_attention(FuseOptions(policy("full-recompute"), 1.0))
        for at, ratio in enumerate(_RATIOS):
            say((number + at / len(_RATIOS)) / steps, f"prompt {number + 1} of {steps}")
            for name in compared if ratio else compared[:1]:
                blend = inspector.measure_attention(replace(context.blend, policy=policy(name), ratio=ratio))
                deviation = attention_deviation(blend, want)
                found.setdefault((name, ratio), []).append(deviation.numpy())
    for name in compared[1:]:
        found[name, 0.0] = found[compared[0], 0.0]
    rows = []
    for (name, ratio), values in sorted(found.items()):
        for layer, value in enumerate(np.mean(values, axis=0)):
            rows.append({"policy": name, "ratio": ratio, "layer": layer, "attention_deviation": float(value)})
    for name in compared:
        rows += [
            {"policy": name, "ratio": 1.0, "layer": layer, "attention_deviation": 0.0} for layer in range(len(want))
        ]
    return rows


def _draw_deviation(rows: Sequence[Row]) -> Drawing:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    names.sort(key=lambda name: name == "random")
    layers = sorted({row["layer"] for row in rows})
    with figure(6.2, 3.6) as (made, axes):
        for index, name in enumerate(names):
            ratios = sorted({row["ratio"] for row in rows if row["policy"] == name})
            means = [
                np.mean([r["attention_deviation"] for r in rows if r["policy"] == name and r["ratio"] == ratio])
                for ratio in ratios
            ]
            look = style("blend") if name != "random" else style("prefix")
            axes.plot([100 * ratio for ratio in ratios], means, label=f"{name}, mean of {len(layers)} layers", **look)
            if not index:
                for layer in layers[1:]:
                    mine = sorted((r["ratio"], r["attention_deviation"]) for r in rows
                                  if r["policy"] == name and r["layer"] == layer)  # fmt: skip
                    axes.plot(
                        [100 * x for x, _ in mine], [y for _, y in mine], color=look["color"], alpha=0.22, linewidth=1
                    )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("recompute ratio, %")
        axes.set_ylabel("attention deviation (L2)")
        axes.legend()
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
    Figure(
        4,
        "The question's attention under full recompute, full KV reuse and the blend",
        "Full KV reuse loses the attention between chunks; recomputing a few tokens brings most of it back.",
        "One prompt whose question needs two chunks, the layer where full KV reuse deviates most, mean over heads; each "
        "column is the highest weight among its tokens, on a square-root scale.",
        _measure_attention,
        _draw_attention,
        0.1,
    ),
    Figure(
        6,
        "Attention deviation against the recompute ratio",
        "Recomputing the tokens of highest KV deviation lowers the attention deviation steeply at first, then slowly.",
        "L2 norm of the difference to full recompute of the question's attention, mean over heads, layers and six prompts; pale "
        "lines are single layers. Random tokens show what choosing is worth.",
        _measure_deviation,
        _draw_deviation,
        1.5,
    ),
)


def attention_deviation(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return ``[layers]``: the L2 norm of the difference of two attentions ``[layers, heads, question, tokens]``.

    The norm is taken over a head's whole matrix, and averaged over heads (paper section 4.2).
    """
    norms: torch.Tensor = torch.linalg.vector_norm((got - want).flatten(2), dim=2)
    return norms.mean(1)
