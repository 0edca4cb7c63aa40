"""Writes one self-contained HTML page per run: settings, versions, tables, plots, the worst disagreements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from cacheblend_lab.evaluation.evaluate import EvalResult
from cacheblend_lab.plotting import figure, render_svg, style


@dataclass(frozen=True)
class Cell:
    """Holds a table cell; ``interval`` is printed small below the text."""

    text: str
    interval: str = ""


@dataclass(frozen=True)
class Table:
    """Holds a table with a heading row."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """Holds a part of the page: text, findings of the paper and of this run, a plot, tables. ``svg`` is inserted unescaped."""

    id: str
    title: str
    paragraphs: Sequence[str] = ()
    paper: str = ""
    here: str = ""
    svg: str = ""
    caption: str = ""
    tables: Sequence[Table] = field(default=())


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    settings: Mapping[str, Any],
    result: EvalResult | None = None,
) -> str:
    """Return the page; every text is escaped. Without a ``result`` the page has no worst disagreements."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("cacheblend_lab.evaluation") / "report.html.j2").read_text("utf-8"))
    shown = {key: _in_words(value) for key, value in settings.items()}
    return template.render(title=title, subtitle=subtitle, sections=sections, settings=shown, result=result)


def _in_words(value: Any) -> Any:
    return ", ".join(f"{key} {one}" for key, one in value.items()) or "none" if isinstance(value, Mapping) else value


def write_report(path: Path, result: EvalResult) -> Path:
    """Write the page of an evaluation and return its path."""
    settings = result.settings
    subtitle = (
        f"{settings['questions']} questions, up to {settings['k']} chunks of {settings['chunk_tokens']} tokens; "
        "95% intervals: Clopper-Pearson for exact match and agreement, bootstrap for the others, both over groups of questions "
        "that share chunks; – where fewer than five questions, or values that are all equal, say nothing"
    )
    page = render_page(
        f"{settings['model']} on {Path(settings['dataset']).name}",
        subtitle,
        result_sections(result),
        {**settings, **result.machine, "answers": result.answers_file.name if result.answers_file else "in memory"},
        result,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def result_sections(result: EvalResult) -> list[Section]:
    """Return the tables and plots of an evaluation: over all questions, and by kind if there are several kinds."""
    sections = [
        Section("results", "Results", svg=_overview(result), tables=[results_table(result.summary["methods"], result)])
    ]
    kinds = result.summary.get("kinds", {})
    if kinds:
        tables = [
            results_table(found, result, f"{kind or 'other'}, {next(iter(found.values()))['n']} questions")
            for kind, found in kinds.items()
        ]
        sections.append(Section("kinds", "By kind of question", svg=_kinds_plot(result), tables=tables))
    if result.skipped:
        count = len(result.skipped)
        rows = [[Cell(row.file), Cell(row.where), Cell(row.why)] for row in result.skipped]
        text = f"{count} row{'s' if count > 1 else ''} of the data set could not be used; no number here counts them."
        sections.append(Section("skipped", "Skipped rows", [text], tables=[Table(("file", "row", "why"), rows)]))
    return sections


def results_table(methods: Mapping[str, Any], result: EvalResult, title: str = "") -> Table:
    """Return the methods' numbers as a table."""
    shares = {
        "em": "exact match",
        "f1": "F1",
        "rouge_l": "Rouge-L",
        "agreement_with_full": "agrees with full",
        "agreement_with_reordered_full": "agrees with full of its own order",
    }
    if all(found["agreement_with_reordered_full"] is None for found in methods.values()):
        del shares["agreement_with_reordered_full"]
    head = ("", *shares.values(), "first-token KL, nats", "TTFT, median", "TTFT, 90%", "tokens computed", "all compute")
    if any(found["background_tokens"] for found in methods.values()):
        head += ("tokens computed behind the answer",)
    rows = []
    for name, found in methods.items():
        intervals = found["intervals_95"]
        cells = [Cell(result.labels[name])]
        for key in shares:
            cells.append(_cell(found[key], intervals.get(key), "{:.1f}", "%", 100))
        cells.append(_cell(found["first_token_kl"], intervals.get("first_token_kl"), "{:.2g}"))
        for key in ("median", "p90"):
            cells.append(_cell(found["ttft_s"][key], intervals["ttft_s"][key], "{:,.0f}", " ms", 1000))
        cells.append(_cell(found["computed_tokens"], intervals["computed_tokens"], "{:,.0f}"))
        cells.append(_cell(found["compute_share"], intervals["compute_share"], "{:.1f}", "%", 100))
        if any(one["background_tokens"] for one in methods.values()):
            cells.append(_cell(found["background_tokens"], intervals["background_tokens"], "{:,.0f}"))
        rows.append(cells)
    return Table(head, rows, title)


def _cell(
    value: float | None, interval: tuple[float, float] | None, form: str, unit: str = "", scale: float = 1
) -> Cell:
    if value is None:
        return Cell("–")
    ends = "–" if interval is None else " – ".join(form.format(end * scale) for end in interval)
    return Cell(form.format(value * scale) + unit, ends)


def _score(result: EvalResult) -> tuple[str, str]:
    """Return the key and the name of the score for the data set's task."""
    summary_like = any(row["task"] != "qa" for row in result.rows)
    return ("rouge_l", "Rouge-L") if summary_like else ("em", "exact match")


def _ends(found: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return the drawn ends of an interval; without an interval both ends are the value."""
    low, high = found["intervals_95"][key] or (found[key], found[key])
    return low, high


def _overview(result: EvalResult) -> str:
    key, label = _score(result)
    methods = result.summary["methods"]
    with figure(8.6, 3.4, columns=2) as (made, (left, right)):
        names = list(methods)
        for index, name in enumerate(names):
            found, look = methods[name], style(name, index)
            value = found[key]
            low, high = _ends(found, key)
            left.barh(index, value, color=look["color"], height=0.62)
            if low < high:
                left.errorbar(
                    value, index, xerr=[[value - low], [high - value]], color="#333333", capsize=3, linewidth=1
                )
            left.annotate(f" {value:.1%}", (high, index), va="center", fontsize=8.5)
            right.plot(
                found["ttft_s"]["median"] * 1000,
                value,
                linestyle="none",
                markersize=9,
                color=look["color"],
                marker=look["marker"],
                label=result.labels[name],
            )
            if low < high:
                right.errorbar(
                    found["ttft_s"]["median"] * 1000,
                    value,
                    yerr=[[value - low], [high - value]],
                    color=look["color"],
                    linewidth=1,
                    capsize=2,
                )
        left.set_yticks(range(len(names)), [result.labels[name] for name in names])
        left.invert_yaxis()
        left.set_xlim(0, max(1.0, *(_ends(m, key)[1] for m in methods.values())) * 1.14)
        left.grid(axis="y", visible=False)
        left.set_title(label)
        right.set_title(f"{label} against TTFT")
        right.set_xlabel("time to first token, ms (median)")
        right.set_ylim(0, 1.05)
        right.set_xlim(0, right.get_xlim()[1] * 1.05)
        right.legend(loc="lower right")
        return render_svg(made)


def _kinds_plot(result: EvalResult) -> str:
    key, label = _score(result)
    kinds = result.summary["kinds"]
    names = list(result.summary["methods"])
    width = 0.8 / len(names)
    with figure(8.6, 3.0) as (made, axes):
        for index, name in enumerate(names):
            found = [kinds[kind].get(name) for kind in kinds]
            at = [i + (index - (len(names) - 1) / 2) * width for i, one in enumerate(found) if one is not None]
            values = [one[key] for one in found if one is not None]
            ends = [_ends(one, key) for one in found if one is not None]
            errors = [[v - low for v, (low, _) in zip(values, ends, strict=True)]]
            errors.append([high - v for v, (_, high) in zip(values, ends, strict=True)])
            axes.bar(at, values, width * 0.92, color=style(name, index)["color"], label=result.labels[name])
            axes.errorbar(at, values, yerr=errors, color="#333333", linestyle="none", linewidth=0.9, capsize=2)
        axes.set_ylim(0, 1.05)
        axes.set_xticks(range(len(kinds)), [kind.replace("_", " ") or "other" for kind in kinds])
        axes.grid(axis="x", visible=False)
        axes.set_title(f"{label} by kind of question")
        axes.legend(ncols=min(4, len(names)), loc="upper center", bbox_to_anchor=(0.5, -0.1))
        return render_svg(made)
