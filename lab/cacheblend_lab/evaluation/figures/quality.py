"""Draws figures of answer quality: 2 (number of chunks), 12 (TTFT), 13 (chunk by chunk), 16 (recompute ratio)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row, Say
from cacheblend_lab.evaluation.methods import LABELS
from cacheblend_lab.plotting import draw_points, figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from cacheblend_lab.evaluation.evaluate import EvalResult

_COUNTS: Final = (1, 2, 4, 6, 8)
_POOL: Final = 8
_RATIOS: Final = (0.05, 0.1, 0.2, 0.3, 0.5)
CORE: Final = ("full", "prefix", "reuse", "blend", "map_reduce", "map_rerank")


def _quality(result: EvalResult, **more: Any) -> list[Row]:
    """Return a row per method: score with interval (None if there is none), TTFT, tokens."""
    key = "rouge_l" if any(row["task"] != "qa" for row in result.rows) else "f1"
    rows = []
    for name, found in result.summary["methods"].items():
        low, high = found["intervals_95"][key] or (None, None)
        agreement = found["agreement_with_full"]
        rows.append(
            {
                **more,
                "method": name,
                "label": result.labels[name],
                "score": "Rouge-L" if key == "rouge_l" else "F1",
                "quality": found[key],
                "low": low,
                "high": high,
                "em": found["em"],
                "agreement_with_full": agreement,
                "first_token_kl": found["first_token_kl"],
                "ttft_median_s": found["ttft_s"]["median"],
                "ttft_p90_s": found["ttft_s"]["p90"],
                "computed_tokens": found["computed_tokens"],
                "questions": found["n"],
            }
        )
    return rows


def _ends(row: Row) -> tuple[float, float]:
    """Return the drawn ends of a row's interval; without an interval both ends are the value."""
    return (row["quality"], row["quality"]) if row["low"] is None else (row["low"], row["high"])


def _measure_counts(context: FigureContext, say: Say) -> list[Row]:
    rows = []
    for at, count in enumerate(_COUNTS):
        preparation = replace(context.settings.preparation, k=count)
        result = context.evaluate(
            ("full", "reuse", "blend"),
            lambda done, text, at=at: say((at + done) / len(_COUNTS), text),  # type: ignore[misc]
            preparation=preparation,
            demo_chunks=_POOL,
            limit=max(8, context.settings.limit * 2 // 3),
        )
        rows += _quality(result, chunks=count)
    return rows


def _draw_counts(rows: Sequence[Row]) -> Drawing:
    with figure(6.0, 3.6) as (made, axes):
        for name in ("full", "blend", "reuse"):
            mine = [row for row in rows if row["method"] == name]
            interval = tuple(zip(*map(_ends, mine), strict=True))
            draw_points(
                axes,
                name,
                mine[0]["label"],
                [row["chunks"] for row in mine],
                [row["quality"] for row in mine],
                interval,
            )
        axes.set_xticks(sorted({row["chunks"] for row in rows}))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("retrieved chunks in the prompt")
        axes.set_ylabel(rows[0]["score"])
        axes.legend(loc="lower right")
        return made


def _measure_methods(context: FigureContext, say: Say) -> list[Row]:
    return _quality(context.evaluate(CORE, say))


def _draw_ttft(rows: Sequence[Row], names: Sequence[str] = ("full", "prefix", "reuse", "blend")) -> Drawing:
    with figure(6.0, 3.8) as (made, axes):
        for index, row in enumerate(row for row in rows if row["method"] in names):
            look = style(row["method"], index)
            x, y = row["ttft_median_s"] * 1000, row["quality"]
            low, high = _ends(row)
            if row["low"] is not None:
                axes.errorbar(x, y, [[y - low], [high - y]], color=look["color"], linewidth=1.2, capsize=3, zorder=2)
            axes.plot(
                x, y, look["marker"], color=look["color"], markersize=10, label=row["label"], zorder=3, clip_on=False
            )
        axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
        axes.set_ylim(0, max(0.05, 1.05 * max(_ends(row)[1] for row in rows)))
        axes.set_xlabel("time to first token, ms (median)")
        axes.set_ylabel(rows[0]["score"])
        axes.annotate(
            "better", (0.02, 0.98), (0.13, 0.87), xycoords="axes fraction", textcoords="axes fraction", fontsize=8.5,
            color="#777777", arrowprops={"arrowstyle": "->", "color": "#777777"},
        )  # fmt: skip
        axes.legend(loc="lower right")
        return made


def _draw_chunkwise(rows: Sequence[Row]) -> Drawing:
    return _draw_ttft(rows, ("full", "blend", "map_reduce", "map_rerank"))


def _measure_ratios(context: FigureContext, say: Say) -> list[Row]:
    policy = context.blend.policy.name
    layers = context.settings.blend.check_layers
    behind = f"@{'+'.join(map(str, layers))}" if layers else ""
    names = {f"{policy}@{ratio:g}{behind}": ratio for ratio in _RATIOS}
    rows = []
    for row in _quality(context.evaluate(("full", "reuse", *names), say)):
        ends = {"full": 1.0, "reuse": 0.0}
        rows.append({"ratio": ends.get(row["method"], names.get(row["method"])), **row})
    return sorted(rows, key=lambda row: row["ratio"])


def _draw_ratios(rows: Sequence[Row]) -> Drawing:
    full = next(row for row in rows if row["method"] == "full")
    blends = [row for row in rows if row["method"] != "full"]
    with figure(8.0, 3.4, columns=2) as (made, (left, right)):
        x = [row["ratio"] * 100 for row in blends]
        look = style("blend")
        left.fill_between(x, *zip(*map(_ends, blends), strict=True), color=look["color"], alpha=0.13)
        left.plot(x, [row["quality"] for row in blends], label="blend", **look)
        left.axhline(full["quality"], color=style("full")["color"], linewidth=1.2, linestyle="--", label=LABELS["full"])
        left.set_ylim(0, 1.02)
        left.set_xlabel("recompute ratio, %")
        left.set_ylabel(rows[0]["score"])
        left.legend(loc="lower right")
        right.plot(x, [row["ttft_median_s"] * 1000 for row in blends], label="blend", **look)
        right.axhline(full["ttft_median_s"] * 1000, color=style("full")["color"], linewidth=1.2, linestyle="--")
        right.annotate(
            LABELS["full"], (0, full["ttft_median_s"] * 1000), (2, -12), textcoords="offset points", fontsize=8.5
        )
        right.set_ylim(0, full["ttft_median_s"] * 1150)
        right.set_xlabel("recompute ratio, %")
        right.set_ylabel("time to first token, ms (median)")
        return made


FIGURES: Final = (
    Figure(
        2,
        "Quality against the number of retrieved chunks",
        "Quality rises with the number of chunks as long as they may attend to each other; with full KV reuse it falls "
        "behind full recompute.",
        "The question's nearest chunks by L2 distance, in reading order. The demo set retrieves from contexts of 8 chunks. Bands "
        "are 95% intervals; there are none below five questions.",
        _measure_counts,
        _draw_counts,
        2.5,
    ),
    Figure(
        12,
        "Time to first token against quality",
        "TTFT 2.2 to 3.3 times sooner than full recompute, with a loss of quality of at most 0.02 in F1 or Rouge-L, at a "
        "recompute ratio of 15%; 0.1 to 0.2 higher F1 and 0.03 to 0.25 higher Rouge-L than full KV reuse, about as soon.",
        "One request at a time; KV in RAM; the prefix cache's loads are free. Bars are 95% intervals.",
        _measure_methods,
        _draw_ttft,
        2.5,
    ),
    Figure(
        13,
        "Against asking chunk by chunk",
        "Answers put together from single chunks come later (MapReduce) or are worse (MapRerank) than a blend's.",
        "MapReduce's TTFT counts all its map requests; MapRerank's first token is known when all chunks have been scored. It "
        "scores by the probability of an answer's first token. A small model cannot put single answers together.",
        _measure_methods,
        _draw_chunkwise,
        0.1,
    ),
    Figure(
        16,
        "Quality and time to first token against the recompute ratio",
        "15% is enough for almost all of the quality; more recompute only takes longer.",
        "Ratio 0 is full KV reuse; the dashed line is full recompute. The band is the 95% interval.",
        _measure_ratios,
        _draw_ratios,
        2.5,
    ),
)
