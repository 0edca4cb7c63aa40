"""Draws figures of speed: 10 and 17 (storage devices), 14 (request rate), 15 (chunk number, chunk length, batch size)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

from cacheblend_lab.bench.sweeps import (
    READY,
    Axis,
    ThrottledStore,
    choose_rates,
    simulate_queue,
    sweep_devices,
    sweep_sizes,
)
from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row, Say
from cacheblend_lab.evaluation.figures.quality import CORE
from cacheblend_lab.evaluation.methods import LABELS
from cacheblend_lab.plotting import draw_methods, draw_points, figure, log_scale, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_TIMED: Final = ("full", "prefix", "reuse", "blend")
_TIMED_LABELS: Final = {**LABELS, "blend": "blend"}


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
            draw_points(axes, name, _TIMED_LABELS[name], [row["rate"] for row in mine], [row["ttft_s"] for row in mine])
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
            draw_methods(axes, _TIMED, _TIMED_LABELS, [row for row in rows if row["panel"] == panel], "x")
            axes.set_xlabel(title)
            axes.set_xticks(sorted({row["x"] for row in rows if row["panel"] == panel}))
            axes.set_ylim(bottom=0)
        all_axes[0].set_ylabel("time to first token, s")
        all_axes[0].legend()
        return made


_RATES: Final = (5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 4.8e9)
_LABELS: Final = {**LABELS, "blend": "blend, lowest ratio", "controller": "loading controller"}
_GB: Final = 1e-9


def _measure(context: FigureContext, say: Say) -> list[Row]:
    """Measure every method at every bandwidth, once for both figures."""

    def sweep() -> list[Row]:
        engine = context.engine
        usual = engine.store
        engine.store = ThrottledStore(_RATES[0])
        try:
            begun = itertools.count()
            return sweep_devices(
                context.workbench, _RATES, context.repeat, lambda text: say(next(begun) / len(_RATES), text)
            )
        finally:
            engine.store = usual

    return context.once("devices", sweep)


def _measure_times(context: FigureContext, say: Say) -> list[Row]:
    return [row for row in _measure(context, say) if not _of(row, READY)]


def _measure_choices(context: FigureContext, say: Say) -> list[Row]:
    rows = _measure(context, say)
    recompute_s = median([row["ttft_s"] for row in rows if _of(row, READY)])
    return [
        {**row, "load_s": row["loaded_bytes"] / row["bytes_per_s"], "recompute_s": recompute_s}
        for row in rows
        if row["method"] in ("full", "blend", "controller")
    ]


def _draw_choices(rows: Sequence[Row]) -> Drawing:
    with figure(9.2, 3.6, columns=2) as (made, (device, ratio)):
        blends = sorted((row for row in rows if _of(row, "blend")), key=lambda row: row["bytes_per_s"])
        rates = [row["bytes_per_s"] * _GB for row in blends]
        draw_methods(device, ("full", "blend"), _LABELS, rows, "bytes_per_s", _GB)
        device.plot(rates, [row["load_s"] for row in blends], color="#D55E00", linestyle=":", label="loading alone")
        device.axhline(
            blends[0]["recompute_s"], color="#56B4E9", linestyle="--", linewidth=1.4, label="recomputing alone"
        )
        free = [row["bytes_per_s"] * _GB for row in blends if row["load_s"] <= row["recompute_s"]]
        if free:
            device.axvspan(min(free), max(rates), color="#009E73", alpha=0.09, linewidth=0, label="adds no delay")
        device.set_ylim(0, 1.6 * max(row["ttft_s"] for row in rows))  # room for the legend
        device.set_ylabel("time to first token, s")
        device.set_title("Ratio fixed: which device?")
        for name in ("blend", "controller"):
            mine = sorted((row for row in rows if _of(row, name)), key=lambda row: row["bytes_per_s"])
            ratio.plot(rates, [_computed(row) for row in mine], label=_LABELS[name], **style(name))
        ratio.set_ylim(0, 1.03)
        ratio.set_ylabel("share of the prompt computed")
        ratio.set_title("Device fixed: how much to recompute?")
        device.legend(loc="upper right", ncols=2)
        ratio.legend()
        for axes in (device, ratio):
            _bandwidths(axes)
        return made


def _draw_times(rows: Sequence[Row]) -> Drawing:
    with figure(6.2, 3.6) as (made, axes):
        draw_methods(axes, ("full", "prefix", "reuse", "blend", "controller"), _LABELS, rows, "bytes_per_s", _GB)
        _bandwidths(axes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time to first token, s")
        axes.legend()
        return made


def _bandwidths(axes: Axes) -> None:
    log_scale(axes)
    axes.set_xlabel("bandwidth of the storage device, GB/s (simulated)")


def _of(row: Row, method: str) -> bool:
    return bool(row["method"] == method)


def _computed(row: Row) -> float:
    return float(row["computed_tokens"] / row["prompt_tokens"])


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
    Figure(
        10,
        "What the loading controller chooses",
        "With the device fixed, the ratio can rise until recomputing takes as long as loading, at no extra latency; with the "
        "ratio fixed, KV can lie on the cheapest device that loads as fast as it recomputes.",
        "The runs of figure 17. Loading alone is what the blend read, divided by the bandwidth; recomputing alone is the blend's "
        "time where loading takes none. On slow devices the controller computes some chunks in place, or all of the prompt.",
        _measure_choices,
        _draw_choices,
        2.0,
    ),
    Figure(
        17,
        "Time to first token against the storage device's bandwidth",
        "The slower the device, the more loading dominates, and the closer blend and full KV reuse come to each other.",
        "Bandwidths are simulated by a throttled RAM tier, latency is not; the prefix cache loads for free, as in the paper.",
        _measure_times,
        _draw_times,
        0.2,
    ),
)
