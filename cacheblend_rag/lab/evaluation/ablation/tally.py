"""Collects what every variant measured, and says how far it is from the one we use."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np

from cacheblend_rag.lab.doctor.compared import Comparison
from cacheblend_rag.lab.stats.intervals import mean_interval


class AblationTally:
    """Values by variant and ratio, one a prompt; every variant gets every prompt, in turn."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: dict[str, dict[float, list[float]]] = {}

    def note(self, name: str, ratio: float, value: float) -> None:
        """Add a prompt's value."""
        self._found.setdefault(name, {}).setdefault(ratio, []).append(value)

    def means(self, key: str, against: str | None = None) -> dict[str, dict[str, dict[str, float | None]]]:
        """Return ``{variant: {ratio: {key, "low", "high"}}}``; the interval's ends are None for fewer than five prompts.

        With ``against`` also ``less``, ``less_low`` and ``less_high``: the mean of that variant at the same ratio less this
        one's, prompt by prompt. Prompts differ far more than variants do, so only this tells variants apart.
        """
        table: dict[str, dict[str, dict[str, float | None]]] = {}
        for name, by_ratio in self._found.items():
            for ratio, values in by_ratio.items():
                low, high = _interval(values)
                row: dict[str, float | None] = {key: float(np.mean(values)), "low": low, "high": high}
                base = self._found.get(against, {}).get(ratio) if against and name != against else None
                if base is not None:
                    less = [b - v for b, v in zip(base, values, strict=True)]
                    row["less"] = float(np.mean(less))
                    row["less_low"], row["less_high"] = _interval(less)
                table.setdefault(name, {})[f"{ratio:g}"] = row
        return table


class Comparisons:
    """KL, in nats, and agreement, in shares, of the answer's first tokens against full recompute."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kl, self._agreement = AblationTally(), AblationTally()

    def note(self, name: str, ratio: float, found: Comparison) -> None:
        """Add a prompt's blend."""
        self._kl.note(name, ratio, fmean(found.kl))
        self._agreement.note(name, ratio, fmean(found.agrees))

    def means(self, against: str) -> dict[str, Any]:
        """Return ``{"kl": {variant: {ratio: ...}}, "agreement": ...}``, each as :meth:`Tally.means` gives it."""
        return {"kl": self._kl.means("kl", against), "agreement": self._agreement.means("agreement", against)}


def _interval(values: list[float]) -> tuple[float, float] | tuple[None, None]:
    # The prompts do not share chunks: they are resampled one by one.
    return mean_interval(values, [""] * len(values)) or (None, None)


def table_of(found: dict[str, Any], key: str, title: str) -> str:
    """Return what :meth:`Tally.means` gave as a Markdown table of means with their intervals."""
    ratios = sorted({float(ratio) for by_ratio in found.values() for ratio in by_ratio})
    rows = [[title, *(f"{ratio:.0%}" for ratio in ratios)], ["---"] * (len(ratios) + 1)]
    for name, by_ratio in found.items():
        rows.append([name, *(_cell(by_ratio.get(f"{ratio:g}"), key) for ratio in ratios)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(row: dict[str, float | None] | None, key: str) -> str:
    if row is None:
        return ""
    text = f"{row[key]:.3g}"
    return text if row["low"] is None else f"{text} [{row['low']:.3g}, {row['high']:.3g}]"
