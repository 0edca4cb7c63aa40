"""From rows of answers to the numbers that are shown, with 95% bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cacheblend_rag.evaluation.answers import Row
from cacheblend_rag.evaluation.intervals import mean_interval, median_interval

_MEANS: Final = {
    "em": "em",
    "f1": "f1",
    "f1_model_tokens": "f1_model_tokens",
    "rouge_l": "rouge_l",
    "first_token_kl": "first_token_kl",
    "agreement_with_full": "agrees_with_full",
    "computed_tokens": "computed_tokens",
    "reused_tokens": "reused_tokens",
    "prompt_tokens": "prompt_tokens",
}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``{"methods": {name: numbers}, "kinds": {kind: {name: numbers}}}``; kinds only where there are several.

    ``numbers`` holds means of the scores (0 to 1), of the KL (nats) and of the token counts, ``computed_share`` of the prompt,
    ``ttft_s`` with ``median`` and ``p90``, ``requests_per_s`` of one request after another, and under ``intervals_95`` the
    bootstrap interval of each. A mean is None where it was not measured.
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
        intervals[name] = mean_interval(numbers, groups)
    shares = [row["computed_tokens"] / row["prompt_tokens"] for row in rows]
    found["computed_share"] = float(np.mean(shares))
    intervals["computed_share"] = mean_interval(shares, groups)
    ttft = [row["ttft_s"] for row in rows]
    found["ttft_s"] = {"median": float(np.median(ttft)), "p90": float(np.quantile(ttft, 0.9))}
    intervals["ttft_s"] = {"median": median_interval(ttft), "p90": median_interval(ttft, quantile=0.9)}
    found["requests_per_s"] = len(rows) / sum(row["total_s"] for row in rows)
    found["intervals_95"] = intervals
    return found


def find_worst(
    rows: Sequence[Row], count: int = 10, method: str = "blend", reference: str = "full"
) -> list[dict[str, Any]]:
    """Return the ``count`` questions on which ``method`` does worst against ``reference``, both answers side by side.

    First those that it alone gets wrong, then other differing answers, then by first-token KL; none that agree in all.
    """
    by_id: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_id.setdefault(row["id"], {})[row["method"]] = row
    pairs = [found for found in by_id.values() if method in found and reference in found]

    def badness(found: dict[str, Row]) -> tuple[float, bool, float]:
        ours, theirs = found[method], found[reference]
        score = "rouge_l" if ours["task"] != "qa" else "f1"
        return theirs[score] - ours[score], ours["answer"] != theirs["answer"], ours["first_token_kl"] or 0.0

    differing = [found for found in pairs if found[method]["answer"] != found[reference]["answer"]]
    chosen = sorted(differing, key=badness, reverse=True)[:count]
    return [
        {
            "id": found[method]["id"],
            "kind": found[method]["kind"],
            "question": found[method]["question"],
            "answers": found[method]["answers"],
            "replies": {name: row["answer"] for name, row in found.items()},
            "scores": {name: row["rouge_l" if row["task"] != "qa" else "em"] for name, row in found.items()},
            "first_token_kl": found[method]["first_token_kl"],
        }
        for found in chosen
    ]
