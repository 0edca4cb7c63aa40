"""The picture of a calibration: agreement with full recompute against compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cacheblend_rag.doctor.calibration import Calibration, Measured
from cacheblend_rag.errors import InputError
from cacheblend_rag.evaluation.plotting import figure

# Of Okabe and Ito's colours, as in all our figures.
_LOOKS: Final = {
    "full-reuse": ("#D55E00", "v"),
    "static": ("#0072B2", "o"),
    "static-query": ("#009E73", "^"),
    "hkvd": ("#E69F00", "s"),
}
_AXIS: Final = {
    "tokens": "tokens that agree with full recompute, %",
    "likelihood": "exp(-KL), likelihood kept a token, %",
}
_SUFFIXES: Final = {".png", ".svg", ".pdf"}


def plot_calibration(found: Calibration, file: Path) -> None:
    """Draw every candidate that was measured, with its bounds, and mark the chosen one.

    Filled marks were measured on all prompts; hollow ones show the first few: they could not hold, or cost more than the chosen.

    Raises:
        InputError: The file's name has another suffix, or it cannot be written.
        ModelError: matplotlib is not installed.
    """
    check_plot_name(file)
    goal = found.standard.agreement
    with figure(7.2, 4.2) as (made, axes):
        for name, line in _lines(found.measured).items():
            colour, mark = _LOOKS[line[0].policy]
            x, y = [100 * each.compute for each in line], [100 * each.agreement.value for each in line]
            axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.6)
            for each, at, value in zip(line, x, y, strict=True):
                below, above = value - 100 * each.agreement.low, 100 * each.agreement.high - value
                axes.errorbar(at, value, [[below], [above]], color=colour, linewidth=0.9, capsize=2, alpha=0.7)
                fill = colour if each.complete else "white"
                axes.plot(at, value, mark, color=colour, markerfacecolor=fill, markersize=6, zorder=3)
            axes.plot([], [], mark, color=colour, label=name)
        axes.axhline(100 * goal, color="#222222", linewidth=1.0, linestyle="--")
        axes.annotate(
            f"wanted: {100 * goal:g}%", (1.0, 100 * goal), (-2, -11), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=8.5, ha="right",
        )  # fmt: skip
        if found.chosen is not None:
            at, value = 100 * found.chosen.compute, 100 * found.chosen.agreement.value
            axes.plot(
                at, value, "*", color="#CC79A7", markeredgecolor="#222222", markersize=15, zorder=4, label="chosen"
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "235" else "")
        low = min(each.agreement.value for each in found.measured)
        axes.set_ylim(100 * max(0.0, min(low, goal) - 0.06), 101)
        axes.set_xlabel("compute, % of a full recompute (dense and ranking passes included)")
        axes.set_ylabel(_AXIS[found.standard.by])
        axes.set_title(_title(found))
        axes.legend(loc="lower right")
        try:
            made.savefig(file)
        except OSError as error:
            raise InputError(f"The plot {file} cannot be written: {error.strerror or error}.") from error


def check_plot_name(file: Path) -> None:
    """Refuse, before hours of measuring, a file that nothing can be drawn into; raises InputError."""
    if file.suffix not in _SUFFIXES:
        raise InputError(f"The plot {file} needs a name that ends with {', '.join(sorted(_SUFFIXES))}.")


def _lines(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Return what belongs together, by its name in the legend, each by compute."""
    lines: dict[str, list[Measured]] = {}
    for each in measured:
        layers = f", check layer {' and '.join(map(str, each.check_layers))}" if each.check_layers else ""
        lines.setdefault("full KV reuse" if not each.ratio else f"{each.policy}{layers}", []).append(each)
    return lines


def _title(found: Calibration) -> str:
    shown = {"shown": "", "not shown": ", not shown", "do not blend": "do not blend"}[found.verdict]
    if found.chosen is None:
        return f"{shown}: {found.prompts} prompts"
    return f"{found.chosen.policy} {found.chosen.ratio:.0%}{shown}: {found.prompts} prompts"
