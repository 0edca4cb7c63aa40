"""Measures and draws the figures of one run, and writes the page with all figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from cacheblend_lab.evaluation.figures import attention, devices, quality
from cacheblend_lab.evaluation.figures.base import Figure, FigureContext, Row
from cacheblend_lab.evaluation.figures.findings import FINDINGS
from cacheblend_lab.evaluation.report import Section, render_page, result_sections
from cacheblend_lab.plotting import render_svg, save_figure
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.errors import InputError, ModelError

_EVERY = (*quality.FIGURES, *attention.FIGURES, *devices.FIGURES)
FIGURES: Final = {figure.number: figure for figure in sorted(_EVERY, key=lambda figure: figure.number)}
"""Every figure by its number in the paper."""

Progress = Callable[[float, int, str], None]


def parse_numbers(text: str | None) -> list[int]:
    """Return the numbers of the figures in a list such as ``2,6,12-17``; None selects all.

    Raises:
        InputError: The text is not a list of figures, or names a figure that does not exist.
    """
    if text is None:
        return list(FIGURES)
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise InputError(f"--only {text!r} is not a list of figures; write 2,6,12-17.")
        named = [number for number in range(int(first), int(last or first) + 1) if number in FIGURES]
        if not named:
            raise InputError(f"There is no figure {part.strip()} here; there are {', '.join(map(str, FIGURES))}.")
        found.update(named)
    return sorted(found)


def make_figures(context: FigureContext, numbers: Sequence[int], progress: Progress | None = None) -> Path:
    """Measure and draw figures into the context's directory: PNG, SVG and CSV of each, and ``index.html``.

    Measurements of an earlier run with the same settings are reused, so that an interrupted run can resume.

    Returns:
        Path of the page.

    Raises:
        ModelError: The model is not blended.
    """
    if not context.engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to show: {context.engine.gate.reason}.")
    show = progress or (lambda done, total, at: None)
    context.out.mkdir(parents=True, exist_ok=True)
    chosen = [FIGURES[number] for number in numbers]
    total = sum(figure.minutes for figure in chosen)
    done = 0.0
    sections = []
    for figure in chosen:

        def say(share: float, text: str, figure: Figure = figure, done: float = done) -> None:
            show(100 * (done + figure.minutes * share) / total, 100, f"figure {figure.number}: {text}")

        say(0, figure.title)
        sections.append(_make(context, figure, say))
        done += figure.minutes
    show(100, 100, "report")
    if context.main is None and {12, 13, 14} & set(numbers):
        # The figures were measured earlier, so that their answers are read instead of computed.
        context.evaluate(quality.CORE, lambda share, text: None)
    return _write_page(context, sections)


def _make(context: FigureContext, figure: Figure, say: Callable[[float, str], None]) -> Section:
    name = f"figure-{figure.number:02}"
    kept = context.out / f"{name}.json"
    settings = _settings(context, figure)
    rows = _read(kept, settings)
    if rows is None:
        rows = figure.measure(context, say)
        kept.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    with (context.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    drawn = figure.draw(rows)
    vector = render_svg(drawn)
    save_figure(drawn, context.out / name, f"Figure {figure.number}. {figure.title}")
    found = FINDINGS.get(figure.number)
    return Section(
        f"figure-{figure.number}",
        f"Figure {figure.number}. {figure.title}",
        paper=figure.paper,
        here="" if found is None else found(rows),
        svg=vector,
        caption=figure.caption,
    )


def _settings(context: FigureContext, figure: Figure) -> dict[str, Any]:
    text = {
        **context.identity,
        "blend": context.blend.to_params(),
        "repeat": context.repeat,
        "figure": figure.number,
    }
    found: dict[str, Any] = json.loads(json.dumps(text))
    return found


def _read(file: Path, settings: dict[str, Any]) -> list[Row] | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        rows: list[Row] = kept["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if kept.get("settings") == settings and rows else None


def _write_page(context: FigureContext, sections: Sequence[Section]) -> Path:
    engine = context.engine
    result = context.main
    page = context.out / "index.html"
    page.write_text(
        render_page(
            f"{engine.fingerprint.name}: the paper's figures",
            "Each figure of CacheBlend (arXiv 2405.16444) measured on this model, with what the paper found beside it",
            [*sections, *(result_sections(result) if result is not None else [])],
            {**context.identity, **describe_machine(engine.runner.device)},
            result,
        ),
        encoding="utf-8",
    )
    return page
