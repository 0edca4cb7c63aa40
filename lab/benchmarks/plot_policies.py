"""Plots agreement with full recompute against compute and speed-up, the figure of docs/results.md.

python lab/benchmarks/plot_policies.py docs/policies.png --answers report/*/answers-*.jsonl
    --ttft lab/benchmarks/results/ttft-*.json

Answers come from `cacheblend eval` (see pooled_quality.py), speed-ups from `cacheblend bench ttft --json`. The right
plot shows the methods, by policy and ratio, that both sources have; the check layers are each model's own.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from pooled_quality import read_rows

from cacheblend_lab.evaluation.summary import summarize
from cacheblend_lab.plotting import figure  # not public: our own results

COLOURS = {
    "full": "#222222",
    "prefix": "#7f7f7f",
    "reuse": "#D55E00",
    "static": "#0072B2",
    "static-query": "#56B4E9",
    "hkvd": "#009E73",
    "query": "#CC79A7",
    "random": "#B8860B",
    "sink": "#E69F00",
}
NAMES = {"full": "full recompute", "prefix": "prefix caching", "reuse": "full KV reuse"}
ENGINES = {"transformers": "o", "vllm": "s"}


def parts_of(name: str) -> tuple[str, float | None]:
    """Return the policy and ratio of a method's name, as hkvd@0.15@2."""
    match = re.fullmatch(r"([a-z_+-]+)(?:@([\d.]+))?(?:@.*)?", name)
    assert match is not None, name
    return match[1], float(match[2]) if match[2] else None


def read_speeds(files: list[Path]) -> list[tuple[str, float | None, str, float]]:
    """Return policy, ratio, engine and median speed-up over full recompute of each method, for runs with KV in RAM."""
    found: dict[tuple[str, float | None, str], list[float]] = {}
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["settings"].get("cold") or run["settings"]["kv"] != "ram":
            continue
        full = median(run["methods"]["full"]["ttft_s"])
        for name, method in run["methods"].items():
            blend = name == "blend"
            key = run["settings"]["policy"] if blend else name, run["settings"]["ratio"] if blend else None
            found.setdefault((*key, run["engine"]), []).append(full / median(method["ttft_s"]))
    return [(*key, median(values)) for key, values in found.items()]


LEFT, RIGHT, ABOVE, BELOW = (
    ((-5, 0), "right", "center"),
    ((5, 0), "left", "center"),
    ((0, 6), "center", "bottom"),
    ((0, -6), "center", "top"),
)


def point(
    axes: Any, x: float, found: dict[str, Any], policy: str, ratio: float | None, marker: str, bars: bool, side: Any
) -> None:
    """Plot one method: the colour shows the policy, the number the ratio, the bars the interval of the agreement."""
    share = 100 * found["agreement_with_full"]
    limits = found["intervals_95"]["agreement_with_full"] if bars else None
    low, high = limits or (share / 100, share / 100)
    spread = [[max(0, share - 100 * low)], [max(0, 100 * high - share)]]
    axes.errorbar([x], [share], spread, fmt=marker, color=COLOURS[policy], capsize=2, elinewidth=1, zorder=3)
    if ratio is not None:
        offset, across, along = side
        text = f"{ratio:.0%}"
        axes.annotate(text, (x, share), offset, textcoords="offset points", fontsize=7.5, ha=across, va=along)


def name_colours(axes: Any, policies: list[str]) -> None:
    """Plot a legend of policies by colour and of engines by marker."""
    for policy in dict.fromkeys(policies):
        axes.plot([], [], "o", color=COLOURS[policy], label=NAMES.get(policy, policy))
    for engine, marker in ENGINES.items():
        axes.plot([], [], marker, color="none", markeredgecolor="#444444", label=f"{engine} engine (right)")
    axes.legend(loc="center left", bbox_to_anchor=(0.02, 0.4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--answers", type=Path, nargs="+", required=True)
    parser.add_argument("--ttft", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    methods = summarize([row for file in options.answers for row in read_rows(file)])["methods"]
    known = {parts_of(name): found for name, found in methods.items()}
    with figure(9.6, 4.2, columns=2) as (made, (left, right)):
        left.set_xscale("log")
        right.set_xscale("log")
        for (policy, ratio), found in known.items():
            point(
                left,
                100 * found["compute_share"],
                found,
                policy,
                ratio,
                "o",
                policy != "full",
                LEFT if policy == "static" else RIGHT,
            )
        for policy, ratio, engine, speed in read_speeds(options.ttft):
            if (policy, ratio) in known:
                side = ABOVE if engine == "transformers" else BELOW
                point(right, speed, known[policy, ratio], policy, ratio, ENGINES[engine], False, side)
        name_colours(right, [policy for policy, _ in known])
        for axes, ticks in ((left, (1, 2, 5, 10, 20, 50, 100)), (right, (1, 2, 5, 10, 20, 40))):
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(48, 104)
        left.set(xlabel="all compute, % of a full prefill", ylabel="answers as full recompute's, %")
        right.set(xlabel="first token sooner than full recompute, times")
        left.set_title("What it costs")
        right.set_title("What it buys")
        made.savefig(options.out)


if __name__ == "__main__":
    main()
