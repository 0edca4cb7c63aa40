"""Computes and plots the age of the index at every step, in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_lab.plotting import figure, save_figure
from cacheblend_lab.realm.runs import RunDirectory
from cacheblend_rag.errors import ModelError

_LOSS_WINDOW = 50


def staleness(directory: Path) -> dict[str, Any]:
    """Return a run's ``steps``, mean ``loss`` over the last 50 and, if an index was searched, the index's staleness.

    Staleness is the number of steps between the parameters that search and the parameters that built the index;
    ``refreshes`` counts the indexes used after the first one.
    """
    rows = RunDirectory(directory).metrics()
    losses = [row["loss"] for row in rows if "loss" in row][-_LOSS_WINDOW:]
    found: dict[str, Any] = {"steps": len(rows)}
    if losses:
        found["loss"] = sum(losses) / len(losses)
    ages = [row["staleness"] for row in rows if "staleness" in row]
    if ages:
        found["staleness_mean"] = sum(ages) / len(ages)
        found["staleness_max"] = max(ages)
        found["refreshes"] = len({row["index_step"] for row in rows if "index_step" in row}) - 1
    return found


def plot_staleness(directory: Path) -> Path | None:
    """Plot the staleness into ``staleness.svg`` and ``.png``; return the SVG's path, or None without matplotlib."""
    rows = [row for row in RunDirectory(directory).metrics() if "staleness" in row]
    try:
        with figure() as (made, axes):
            axes.plot([row["step"] for row in rows], [row["staleness"] for row in rows], drawstyle="steps-post")
            axes.set_xlabel("step")
            axes.set_ylabel("age of the index, in steps")
            save_figure(made, directory / "staleness", "Staleness of the index")
    except ModelError:
        return None
    return directory / "staleness.svg"
