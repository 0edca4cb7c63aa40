"""Plots the tuning of a retriever: its recall during training, and one question's chunks before and after.

cacheblend tune-retriever --demo --json > lab/benchmarks/results/tune-retriever-demo.json
python lab/benchmarks/plot_retriever.py lab/benchmarks/results/tune-retriever-demo.json docs/images/retriever.png
"""

import argparse
import json
import re
import textwrap
from pathlib import Path

from cacheblend_lab.plotting import figure  # not public: our own results

SHOWN = 4
BARS = {
    "retriever before": ("prior", "#7f7f7f"),
    "reader": ("posterior", "#009E73"),
    "retriever after": ("after", "#0072B2"),
}


def nearest_sentence(text: str, question: str) -> str:
    """Return the sentence of a chunk that shares the most words with the question."""
    asked = set(re.findall(r"\w+", question))
    return max(re.split(r"(?<=\.) ", text), key=lambda sentence: len(asked & set(re.findall(r"\w+", sentence))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    with figure(9.6, 3.4, columns=2) as (made, (curve, chunks)):
        steps = [point["step"] for point in results["curve"]]
        for name, label, colour in (("recall_at_5", "recall@5", "#0072B2"), ("mrr", "MRR@20", "#D55E00")):
            curve.plot(
                steps, [100 * point[name] for point in results["curve"]], "o-", color=colour, label=label, ms=3.5
            )
        curve.set(xlabel="steps", ylabel="%", title="Questions kept apart", ylim=(0, 100))
        curve.legend(loc="lower right")
        example = results["example"]
        best = sorted(example["candidates"], key=lambda one: -max(one["prior"], one["posterior"], one["after"]))[:SHOWN]
        for index, (label, (name, colour)) in enumerate(BARS.items()):
            at = [place + 0.27 * (1 - index) for place in range(len(best), 0, -1)]
            chunks.barh(at, [100 * one[name] for one in best], height=0.25, color=colour, label=label)
        texts = [textwrap.fill(nearest_sentence(one["text"], example["question"]), 30) for one in best]
        chunks.set_yticks(range(len(best), 0, -1), texts, fontsize=7.5)
        chunks.set(xlabel="%", xlim=(0, 100), title=textwrap.fill(example["question"], 36))
        chunks.legend(loc="lower right")
        made.savefig(options.out)


if __name__ == "__main__":
    main()
