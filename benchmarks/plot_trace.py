"""Draws a trace: when each layer was loaded, waited for and computed.

cacheblend ask "..." --store DIR --trace out.json
python benchmarks/plot_trace.py out.json docs/images/trace.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from cacheblend_rag.lab.stats.plotting import figure  # not public: our own results

COLOURS = {"loading": "#0072B2", "computing": "#D55E00", "wait and place": "#222222"}


def kind_of(event: dict[str, Any]) -> str | None:
    """Return what an event of one layer shows; None for those of whole passes."""
    if "layer" not in event["args"]:
        return None
    placing = event["cat"] == "computing" and "pass" not in event["args"]
    return "wait and place" if placing else str(event["cat"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    events = json.loads(options.trace.read_text(encoding="utf-8"))["traceEvents"]
    shown = [(kind, event) for event in events if event["ph"] == "X" and (kind := kind_of(event)) is not None]
    begin = min(event["ts"] for _, event in shown)
    with figure(7.2, 3.2) as (made, axes):
        for kind, colour in COLOURS.items():
            bars = [event for own, event in shown if own == kind]
            axes.barh(
                [event["args"]["layer"] + (0.2 if kind == "loading" else -0.2) for event in bars],
                [event["dur"] / 1e3 for event in bars],
                left=[(event["ts"] - begin) / 1e3 for event in bars],
                height=0.38,
                color=colour,
                edgecolor="white",
                linewidth=0.3,
                label=kind,
            )
        axes.set(xlabel="ms since the first read", ylabel="layer")
        axes.invert_yaxis()
        axes.legend(loc="lower left")
        made.savefig(options.out)


if __name__ == "__main__":
    main()
