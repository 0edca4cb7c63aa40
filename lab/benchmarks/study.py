"""Compares methods on several data sets with one model, in days of background time: F1, answers that stay, speed, KL.

python lab/benchmarks/study.py --model qwen2.5-1.5b --data DIR --out report/qwen [--questions 60] [--sets 2wikimqa,musique,...]

Each answer is written at once, so that the next call goes on where a call was stopped. A table is printed for each data
set, and at the end for all data sets together. The score is F1 of words, and Rouge-L for summaries. Retrieval sees only
the passages that a question comes with, so that the answer is mostly among the retrieved chunks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cacheblend_lab.evaluation.evaluate import EvalSettings, evaluate
from cacheblend_lab.evaluation.prepare import Preparation
from cacheblend_lab.evaluation.summary import summarize
from cacheblend_lab.intervals import mean_interval
from cacheblend_rag import BlendSettings, TransformersEngine

METHODS = (
    "full",
    "reuse",
    "static@0.15",
    "hkvd@0.15",
    "query@0.15",
    "static-query@0.15",
    "query@0.3",
    "static-query@0.3",
    "static-query@0.5",
)
SETS = ("2wikimqa", "musique", "samsum", "multi_news")
Rows = Sequence[dict[str, Any]]


def score(row: dict[str, Any]) -> float:
    """Return an answer's F1, or Rouge-L for a summary."""
    return float(row["f1" if row["task"] == "qa" else "rouge_l"])


def shown(value: float, limits: tuple[float, float] | None, sign: str = "") -> str:
    """Return a share in points, with its interval."""
    return f"{100 * value:{sign}.1f}" + (
        f" [{100 * limits[0]:{sign}.1f}, {100 * limits[1]:{sign}.1f}]" if limits else ""
    )


def table(rows: Rows) -> str:
    """Return the methods' table over the questions that every method has answered."""
    by_question: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_question.setdefault((row["set"], row["id"]), {})[row["method"]] = row
    methods = list(dict.fromkeys(row["method"] for row in rows))
    whole = [found for found in by_question.values() if len(found) == len(methods)]
    lines = [
        f"{len(whole)} questions, {np.mean([found['full']['prompt_tokens'] for found in whole] or [0]):.0f} tokens a prompt",
        "",
        "| | compute | score | difference | same answer | sooner | first-token KL |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for method, numbers in summarize([row for found in whole for row in found.values()])["methods"].items():
        pairs = [(found[method], found["full"]) for found in whole]
        change = [score(ours) - score(full) for ours, full in pairs]
        mean = np.mean([score(ours) for ours, _ in pairs])
        cells = [method, f"{100 * numbers['compute_share']:.0f}%", f"{100 * mean:.1f}"]
        if method == "full":
            cells += [""] * 4
        else:
            name = "agreement_with_full"
            sooner = np.median([full["ttft_s"] / ours["ttft_s"] for ours, full in pairs])
            cells += [shown(float(np.mean(change)), mean_interval(change, [ours["group"] for ours, _ in pairs]), "+")]
            cells += [shown(numbers[name], numbers["intervals_95"][name])]
            cells += [f"{sooner:.1f}x", f"{numbers['first_token_kl']:.2g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--writer", help="a KV writer, or probe")
    parser.add_argument("--dtype")
    parser.add_argument("--data", type=Path, required=True, help="directory of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="directory of the answers")
    parser.add_argument("--sets", default=",".join(SETS), help="names or files of data sets, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--questions", type=int, default=60, help="of each data set")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    preparation = Preparation(k=given.k, chunk_tokens=given.chunk_tokens, max_tokens=given.max_tokens)
    found: dict[str, Rows] = {}
    dtype = getattr(torch, given.dtype) if given.dtype else None
    with TransformersEngine(given.model, writer=given.writer, dtype=dtype) as engine:
        for name in given.sets.split(","):
            settings = EvalSettings(
                dataset=name,
                data=given.data,
                methods=given.methods.split(","),
                blend=BlendSettings(),
                limit=given.questions,
                seed=given.seed,
                preparation=preparation,
            )
            rows = evaluate(engine, settings, given.out).rows
            found[name] = [{**row, "set": name, "group": row["group"] and f"{name}:{row['group']}"} for row in rows]
            print(f"\n## {name}\n\n{table(found[name])}", flush=True)
    print(f"\n## All\n\n{table([row for rows in found.values() for row in rows])}")


if __name__ == "__main__":
    main()
