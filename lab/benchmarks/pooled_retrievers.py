"""Pools runs of `cacheblend tune-retriever --demo`, one per seed, into one table of the gains from tuning.

for seed in 101 102 103 104 105; do
    cacheblend tune-retriever --demo --seed $seed --json > retriever-$seed.json
done
python lab/benchmarks/pooled_retrievers.py retriever-*.json

Every run holds out the same number of questions, so the mean of the runs is the pooled mean. The 95% intervals are
Student's over the runs, which differ in worlds, splits and trained layers.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

MEASURES = {"recall_at_1": "recall@1", "recall_at_5": "recall@5", "recall_at_20": "recall@20", "mrr": "MRR@20"}
ANSWERS = {"em": "answers, exact match"}


def row(title: str, found: list[dict[str, float]]) -> str:
    """Return a line of the table: the means before and after, and the mean gain with its interval."""
    before, after = ([100 * each[side] for each in found] for side in ("before", "after"))
    gains = [b - a for a, b in zip(before, after, strict=True)]
    half = stdev(gains) / len(gains) ** 0.5 * float(t.ppf(0.975, len(gains) - 1))
    middle = mean(gains)
    interval = f"{middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]"
    return f"| {title} | {mean(before):.1f}% | {mean(after):.1f}% | {interval} |"


def main() -> None:
    runs: list[dict[str, Any]] = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    if len(runs) < 2:
        sys.exit("Name the results of at least two `cacheblend tune-retriever --demo --seed N --json` runs.")
    held_out = sum(run["questions"]["held_out"] for run in runs)
    saved = sum(run["saved"] is not None for run in runs)
    print(f"{len(runs)} worlds, {held_out} questions held out, {saved} of {len(runs)} saved\n")
    print("| | before | after | gain, 95% interval |")
    print("|---|---:|---:|---:|")
    for name, title in (MEASURES | ANSWERS).items():
        print(row(title, [run[name] for run in runs]))
    print(row("out of domain, recall@5", [run["out_of_domain"]["recall_at_5"] for run in runs]))


if __name__ == "__main__":
    main()
