"""Styles plots: one colour and marker per method everywhere, readable in print and without colour."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheblend_rag.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_STYLES: Final = {
    "full": ("#222222", "s", "-"),
    "prefix": ("#7f7f7f", "D", (0, (5, 2))),
    "reuse": ("#D55E00", "v", (0, (1, 1.2))),
    "blend": ("#0072B2", "o", "-"),
    "controller": ("#009E73", "*", "-"),
    "map_reduce": ("#009E73", "^", "--"),
    "map_rerank": ("#CC79A7", "P", "-."),
    "langchain_map_reduce": ("#56B4E9", "<", "--"),
    "langchain_map_rerank": ("#B8860B", ">", "-."),
    "reorder": ("#E69F00", "X", (0, (5, 2))),
    "reorder+blend": ("#56B4E9", "h", "-"),
}
_OTHERS: Final = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#B8860B", "#7f7f7f")

_DOTS_PER_INCH: Final = 200
_RC: Final[Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "cacheblend",
    "savefig.dpi": _DOTS_PER_INCH,
}


def style(name: str, index: int = 0) -> dict[str, Any]:
    """Return colour, marker and line style of a method; ``index`` selects the style of a method without one of its own."""
    if name in _STYLES:
        color, marker, line = _STYLES[name]
    else:
        color, marker, line = _OTHERS[index % len(_OTHERS)], "oXh*dp"[index % 6], "-"
    return {"color": color, "marker": marker, "linestyle": line}


@contextmanager
def figure(width: float = 6.4, height: float = 3.6, columns: int = 1, rows: int = 1) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure and its axes (one, or an array), in the style of this project; sizes in inches.

    Raises:
        ModelError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModelError("Plots need matplotlib: pip install cacheblend-lab.") from error
    with rc_context(_RC):
        made = Figure(figsize=(width, height))
        FigureCanvasAgg(made)
        yield made, made.subplots(rows, columns)


def draw_points(axes: Axes, name: str, label: str, x: Any, y: Any, interval: Any = None) -> None:
    """Draw a line with markers; ``interval`` is a pair of lists, low and high."""
    look = style(name)
    if interval is not None:
        low, high = interval
        axes.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
    axes.plot(x, y, label=label, **look)


def draw_methods(
    axes: Axes,
    names: Sequence[str],
    labels: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    key: str,
    scale: float = 1,
) -> None:
    """Draw each method's median TTFT against ``key``, with a band from its fastest to its slowest round."""
    for name in names:
        mine = sorted((row for row in rows if row["method"] == name), key=lambda row: row[key])
        x, y = [row[key] * scale for row in mine], [row["ttft_s"] for row in mine]
        draw_points(
            axes, name, labels[name], x, y, ([row["fastest_s"] for row in mine], [row["slowest_s"] for row in mine])
        )


def log_scale(axes: Axes, y: bool = False) -> None:
    """Make the x axis (and the y axis if ``y``) logarithmic, with labels at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    if y:
        axes.set_yscale("log")
    for axis in [axes.xaxis] + [axes.yaxis] * y:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def save_figure(made: Figure, path: Path, title: str) -> None:
    """Write a figure as ``path`` with the suffixes png and svg, under a title: the files have no caption."""
    made.suptitle(title, fontsize=11, fontweight="bold", wrap=True)
    made.savefig(path.with_suffix(".png"), dpi=_DOTS_PER_INCH)  # _RC applies only inside figure()
    path.with_suffix(".svg").write_text(render_svg(made), encoding="utf-8")


def render_svg(made: Figure) -> str:
    """Return a figure as SVG for an HTML page."""
    buffer = io.StringIO()
    made.savefig(buffer, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]
