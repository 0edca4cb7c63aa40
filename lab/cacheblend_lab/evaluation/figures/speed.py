"""Draws figures of speed: 14 (request rate), 15 (chunk number, chunk length, batch size)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheblend_lab.bench.sweeps import Axis, choose_rates, simulate_queue, sweep_sizes
from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row, Say
from cacheblend_lab.evaluation.figures.quality import CORE
from cacheblend_lab.evaluation.methods import LABELS
from cacheblend_lab.plotting import draw_methods, draw_points, figure, log_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_TIMED: Final = ("full", "prefix", "reuse", "blend")
_LABELS: Final = {**LABELS, "blend": "blend"}


def _measure_rates(context: FigureContext, say: Say) -> list[Row]:
    result = context.evaluate(CORE, say)
    service = {
        name: [(row["ttft_s"], row["total_s"]) for row in result.rows if row["method"] == name] for name in _TIMED
    }
    return simulate_queue(service, choose_rates(service), context.settings.seed)


def _draw_rates(rows: Sequence[Row]) -> Drawing:
    with figure(6.2, 3.6) as (made, axes):
        for name in _TIMED:
            mine = [row for row in rows if row["method"] == name and row["ttft_s"] is not None]
            draw_points(axes, name, _LABELS[name], [row["rate"] for row in mine], [row["ttft_s"] for row in mine])
            capacity = next(row["capacity"] for row in rows if row["method"] == name)
            axes.axvline(capacity, color=axes.lines[-1].get_color(), linewidth=0.9, linestyle=":", alpha=0.8)
        log_scale(axes, y=True)
        axes.set_xlabel("requests per second (dotted: the most a method can serve)")
        axes.set_ylabel("mean time to first token, s")
        axes.legend()
        return made


def _measure_sizes(context: FigureContext, say: Say) -> list[Row]:
    place = context.workbench
    window = context.engine.context_window - 200
    sweeps: list[tuple[Axis, list[int], int, float]] = [
        ("chunks", [n for n in (2, 4, 6, 8) if n * 512 < window], context.repeat, 0.1),
        ("chunk_tokens", [n for n in (128, 256, 512, 768) if n * 6 < window], context.repeat, 0.4),
        ("batch", [1, 2, 4], max(1, context.repeat - 1), 0.7),
    ]
    return [
        {"panel": panel, "x": point[panel], **point}
        for panel, values, repeat, share in sweeps
        for point in sweep_sizes(place, panel, values, repeat, partial(say, share))
    ]


def _draw_sizes(rows: Sequence[Row]) -> Drawing:
    titles = {
        "chunks": "chunks of 512 tokens",
        "chunk_tokens": "tokens in each of 6 chunks",
        "batch": "requests at once (last one's TTFT)",
    }
    with figure(9.2, 3.2, columns=3) as (made, all_axes):
        for axes, (panel, title) in zip(all_axes, titles.items(), strict=True):
            draw_methods(axes, _TIMED, _LABELS, [row for row in rows if row["panel"] == panel], "x")
            axes.set_xlabel(title)
            axes.set_xticks(sorted({row["x"] for row in rows if row["panel"] == panel}))
            axes.set_ylim(bottom=0)
        all_axes[0].set_ylabel("time to first token, s")
        all_axes[0].legend()
        return made


FIGURES: Final = (
    Figure(
        14,
        "Time to first token against the request rate",
        "Throughput 2.8 to 5 times that of full recompute.",
        "Simulated from the measured times of figure 12: Poisson arrivals, one request after another, as the embedded engine "
        "serves them. A server that batches requests behaves differently.",
        _measure_rates,
        _draw_rates,
        0.1,
    ),
    Figure(
        15,
        "Time to first token against number and length of chunks and batch size",
        "The blend stays ahead of full recompute and prefix caching for every number and length of chunks and every batch size.",
        "Prompts of random tokens and a question of 32; bands reach from the fastest to the slowest round. The embedded engine "
        "computes one request at a time, so a batch takes the sum of its prefills.",
        _measure_sizes,
        _draw_sizes,
        2.5,
    ),
)
