"""Pools runs of `cacheblend eval`, one per seed, into one table with 95% intervals.

for seed in 101 102 103 104 105; do
    cacheblend eval --seed $seed --limit 100 --methods full,reuse,hkvd@0.05@2,static@0.05,static-query@0.05 --out report/$seed
done
python lab/benchmarks/pooled_quality.py report/*/answers-*.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

from cacheblend_lab.evaluation.summary import summarize  # not public: a table of our own results


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the answers of one run; contexts of different runs are different groups."""
    _, *lines = file.read_text(encoding="utf-8").strip().split("\n")  # not splitlines: JSON strings may hold U+2028
    # Only the last answer counts for a question that was answered several times by a method.
    latest = {(row["id"], row["key"]): row for row in map(json.loads, lines)}
    return [{**row, "group": row["group"] and f"{file}:{row['group']}"} for row in latest.values()]


def interval(found: dict[str, Any], name: str) -> str:
    value, limits = found[name], found["intervals_95"].get(name)
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + ("" if limits is None else f" [{100 * limits[0]:.1f}, {100 * limits[1]:.1f}]")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    for cells in (header, ["---", *["---:"] * (len(header) - 1)], *rows):
        print("| " + " | ".join(cells) + " |")


def method_row(name: str, found: dict[str, Any]) -> list[str]:
    shown = [interval(found, each) for each in ("em", "agreement_with_full")]
    kl, limits = found["first_token_kl"], found["intervals_95"].get("first_token_kl")
    kls = f"{kl:.2g}" + ("" if limits is None else f" [{limits[0]:.2g}, {limits[1]:.2g}]")
    return [name, str(found["n"]), f"{100 * found['compute_share']:.1f}", *shown, kls]


def main() -> None:
    rows = [row for name in sys.argv[1:] for row in read_rows(Path(name))]
    if not rows:
        sys.exit("Name the answers-*.jsonl files of `cacheblend eval` runs.")
    summary = summarize(rows)
    header = ["method", "questions", "all compute, %", "exact match, %", "agrees with full recompute, %"]
    print_table([*header, "first-token KL, nats"], [method_row(*item) for item in summary["methods"].items()])
    if kinds := summary.get("kinds"):
        counts = {kind: next(iter(found.values()))["n"] for kind, found in kinds.items()}
        print()
        print_table(
            ["exact match, %", *(f"{kind} ({count})" for kind, count in counts.items())],
            [[name, *(interval(found[name], "em") for found in kinds.values())] for name in summary["methods"]],
        )


if __name__ == "__main__":
    main()
