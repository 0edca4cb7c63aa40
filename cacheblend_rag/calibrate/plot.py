"""Plots a calibration: agreement with full recompute against compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cacheblend_rag.calibrate.calibration import Calibration, MeasuredCandidate
from cacheblend_rag.calibrate.plotting import figure
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, as in all figures of this project.
_LOOKS: Final = {
    "full-reuse": (("#D55E00", "v"),),
    "static": (("#0072B2", "o"),),
    "static-query": (("#009E73", "^"),),
    # hkvd has one line for each choice of check layers.
    "hkvd": (("#E69F00", "s"), ("#7f7f7f", "D"), ("#56B4E9", "P"), ("#B8860B", "X")),
}
_OTHERS: Final = (("#F0E442", "p"),)
_AXIS: Final = {
    "tokens": "tokens that agree with full recompute, %",
    "likelihood": "exp(-KL), likelihood kept a token, %",
}
_SUFFIXES: Final = {".png", ".svg", ".pdf"}


def plot_calibration(found: Calibration, file: Path) -> None:
    """Draw every candidate that was measured, with its bounds, and mark the chosen candidate.

    Filled marks were measured on all prompts. Hollow marks show the first prompts only: the candidate could not hold,
    or cost more than the chosen one.

    Raises:
        InputError: The file's name has an unsupported suffix, or the file cannot be written.
        ModelError: matplotlib is not installed.
    """
    check_plot_name(file)
    goal = 100 * found.standard.agreement
    with figure(8.6, 4.2) as (made, axes):
        seen: dict[str, int] = {}
        for name, line in _lines(found.measured).items():
            policy = line[0].policy
            looks = _LOOKS.get(policy, _OTHERS)
            _draw_line(axes, name, line, *looks[seen.get(policy, 0) % len(looks)])
            seen[policy] = seen.get(policy, 0) + 1
        axes.axhline(goal, color="#222222", linewidth=1.0, linestyle="--", label=f"wanted: {goal:g}%")
        if found.chosen is not None:
            at, value = 100 * found.chosen.compute, 100 * found.chosen.agreement.value
            star = {"color": "#CC79A7", "markeredgecolor": "#222222", "markersize": 15}
            axes.plot(at, value, "*", **star, linestyle="", zorder=4, label="chosen")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
        shown = [100 * each.agreement.value for each in found.measured]
        axes.set_ylim(max(0.0, min(*shown, goal) - 6), max(*shown, 100) + 1)
        axes.set_xlabel("compute, % of a full recompute (dense and question passes included)")
        axes.set_ylabel(
            _AXIS.get(found.standard.by, f"100% less the fall of {found.standard.metric} below full recompute's, %")
        )
        axes.set_title(_title(found))
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
        try:
            made.savefig(file)
        except OSError as error:
            raise InputError(f"The plot {file} cannot be written: {error.strerror or error}.") from error


def _draw_line(axes: Axes, name: str, line: Sequence[MeasuredCandidate], colour: str, mark: str) -> None:
    axes.plot([100 * m.compute for m in line], [100 * m.agreement.value for m in line], color=colour, alpha=0.6, lw=1.0)
    for each in line:
        at, value = 100 * each.compute, 100 * each.agreement.value
        ends = [[max(0.0, value - 100 * each.agreement.low)], [max(0.0, 100 * each.agreement.high - value)]]
        # Bounds from few prompts span the whole plot, so that they are drawn faintly.
        strength = 1.0 if each.complete else 0.18
        axes.errorbar(at, value, ends, color=colour, linewidth=1.2, capsize=3, alpha=strength, zorder=2)
        fill = colour if each.complete else "white"
        axes.plot(at, value, mark, color=colour, markerfacecolor=fill, markersize=6, zorder=3)
    axes.plot([], [], mark, color=colour, linestyle="", label=name)


def check_plot_name(file: Path) -> None:
    """Check the plot's file name before the measurements; raises the errors of :func:`plot_calibration`."""
    if file.suffix not in _SUFFIXES:
        raise InputError(f"The plot {file} needs a name that ends with {', '.join(sorted(_SUFFIXES))}.")
    if not file.parent.is_dir():
        raise InputError(f"The plot {file} cannot be written: there is no directory {file.parent}.")
    with figure():
        pass


def _lines(measured: Sequence[MeasuredCandidate]) -> dict[str, list[MeasuredCandidate]]:
    """Return the candidates of each line by its name in the legend, each line in order of compute."""
    lines: dict[str, list[MeasuredCandidate]] = {}
    for each in measured:
        layers = f", check layer {' and '.join(map(str, each.check_layers))}" if each.check_layers else ""
        lines.setdefault("full KV reuse" if not each.ratio else f"{each.policy}{layers}", []).append(each)
    return lines


def _title(found: Calibration) -> str:
    shown = {"shown": "", "not shown": ", not shown", "do not blend": "do not blend"}[found.verdict]
    if found.chosen is None:
        return f"{shown}: {found.prompts} prompts"
    return f"{found.chosen.policy} {found.chosen.ratio:.0%}{shown}: {found.prompts} prompts"
