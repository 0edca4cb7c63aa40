"""Computes the reported numbers, with 95% intervals, from rows of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cacheblend_lab.evaluation.answers import Row
from cacheblend_lab.intervals import mean_interval, quantile_interval, share_interval

_MEANS: Final = {
    "em": "em",
    "f1": "f1",
    "f1_model_tokens": "f1_model_tokens",
    "rouge_l": "rouge_l",
    "first_token_kl": "first_token_kl",
    "agreement_with_full": "agrees_with_full",
    "agreement_with_reordered_full": "agrees_with_reordered_full",
    "computed_tokens": "computed_tokens",
    "reused_tokens": "reused_tokens",
    "background_tokens": "background_tokens",
    "prompt_tokens": "prompt_tokens",
}

_COMPUTE: Final = {"computed_share": ("computed_tokens",), "compute_share": ("computed_tokens", "selection_tokens")}

_WORST: Final = 10
_SHARES: Final = {"em", "agreement_with_full", "agreement_with_reordered_full"}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``{"methods": {name: numbers}, "kinds": {kind: {name: numbers}}}``; kinds only if there are several.

    ``numbers`` holds means of the scores (0 to 1), of the KL (nats) and of the token counts, ``computed_share`` of the
    prompt, ``compute_share``, which adds the cost of choosing tokens (a full prefill is 1), ``ttft_s`` with ``median``
    and ``p90``, and ``requests_per_s`` for one request after another. ``intervals_95`` holds the interval of each
    number: a Clopper-Pearson interval for exact match and agreement, a bootstrap interval for the others, None if there
    are too few questions or all values are equal. A mean is None if it was not measured.
    """
    kinds = sorted({row["kind"] for row in rows})
    found: dict[str, Any] = {"methods": _by_method(rows)}
    if len(kinds) > 1:
        found["kinds"] = {kind: _by_method([row for row in rows if row["kind"] == kind]) for kind in kinds}
    return found


def _by_method(rows: Sequence[Row]) -> dict[str, Any]:
    names = list(dict.fromkeys(row["method"] for row in rows))
    return {name: _numbers([row for row in rows if row["method"] == name]) for name in names}


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    groups = [row["group"] for row in rows]
    found: dict[str, Any] = {"n": len(rows)}
    intervals: dict[str, Any] = {}
    for name, field in _MEANS.items():
        values = [row[field] for row in rows]
        if any(value is None for value in values):
            found[name] = None
            continue
        numbers = [float(value) for value in values]
        found[name] = float(np.mean(numbers))
        intervals[name] = (share_interval if name in _SHARES else mean_interval)(numbers, groups)
        if name == "agreement_with_full" and rows[0]["method"] == "full":
            intervals[name] = None  # full recompute agrees with itself by definition
    for name, fields in _COMPUTE.items():
        shares = [sum(row[field] for field in fields) / row["prompt_tokens"] for row in rows]
        found[name] = float(np.mean(shares))
        intervals[name] = mean_interval(shares, groups)
    ttft = [row["ttft_s"] for row in rows]
    found["ttft_s"] = {"median": float(np.median(ttft)), "p90": float(np.quantile(ttft, 0.9))}
    intervals["ttft_s"] = {"median": quantile_interval(ttft), "p90": quantile_interval(ttft, quantile=0.9)}
    found["requests_per_s"] = len(rows) / sum(row["total_s"] for row in rows)
    found["intervals_95"] = intervals
    return found


def find_worst(rows: Sequence[Row], methods: Sequence[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the ten questions on which a method does worst against full recompute, all answers side by side.

    Questions are sorted by lost score, then by differing answers, then by first-token KL. Answers that agree by
    ``agreement_with_full``, from the first word to the last, are left out.

    Args:
        rows: Answers.
        methods: Methods to examine; the first method that ever disagrees is shown.

    Returns:
        The method and its questions; the method is None if all methods always agree or full recompute is not among the
        rows.
    """
    by_id: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_id.setdefault(row["id"], {})[row["method"]] = row
    for method in methods:
        pairs = [found for found in by_id.values() if method in found and "full" in found]
        differing = [found for found in pairs if not found[method]["agrees_with_full"]]
        if differing:
            differing.sort(key=lambda found: _badness(found[method], found["full"]), reverse=True)
            return method, [_side_by_side(found, method) for found in differing[:_WORST]]
    return None, []


def _badness(ours: Row, theirs: Row) -> tuple[float, bool, float]:
    score = "rouge_l" if ours["task"] != "qa" else "f1"
    return theirs[score] - ours[score], ours["answer"] != theirs["answer"], ours["first_token_kl"] or 0.0


def _side_by_side(found: dict[str, Row], method: str) -> dict[str, Any]:
    ours = found[method]
    return {
        "id": ours["id"],
        "kind": ours["kind"],
        "question": ours["question"],
        "answers": ours["answers"],
        "replies": {name: row["text"] for name, row in found.items()},
        "scores": {name: row["rouge_l" if row["task"] != "qa" else "em"] for name, row in found.items()},
        "first_token_kl": ours["first_token_kl"],
    }
