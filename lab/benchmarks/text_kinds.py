"""Measures the deviation that a ratio leaves out in several kinds of text, and the ratio that `auto` chooses for each.

python lab/benchmarks/text_kinds.py --data DIR --limit 8 demo musique samsum

The first data set serves as the calibration: its mean and spread at `--ratio` become the profile's.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from cacheblend_lab.datasets import load_data_set
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag import TransformersEngine
from cacheblend_rag.blending.settings import TextRange, TextRatio  # not public: a table of our own results
from cacheblend_rag.calibrate.ledger import left_out


def static_deviations(engine: TransformersEngine, name: str, data: Path | None, limit: int) -> list[torch.Tensor]:
    """Return the static deviations of the tokens with stale KV, for one prompt of each context."""
    samples = load_data_set(name, data, 8 * limit if name == "demo" else limit, 11, engine.tokenizer).samples
    first = list({sample.group or sample.id: sample for sample in reversed(samples)}.values())[::-1][:limit]
    set_header(engine, samples)
    preparer = Preparer(engine, Preparation())
    found = []
    for sample in first:
        chunks = preparer.case(sample).chunks
        engine.precompute(chunks)
        stored = [engine.entries.get(chunk.token_ids, engine.num_layers) for chunk in chunks[1:]]
        parts = [kv.static_deviation() for kv in stored if kv is not None]
        found.append(torch.cat([part for part in parts if part is not None]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.05)
    options = parser.parse_args()
    rule: TextRatio | None = None
    print("| data | prompts | left out: mean | spread | least | most | ratio by auto |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with TransformersEngine(options.model, ranking="now") as engine:
        for name in options.datasets:
            found = static_deviations(engine, name, options.data, options.limit)
            shares = np.array([left_out(static, options.ratio) for static in found])
            text = TextRange(float(shares.mean()), float(shares.std()))
            rule = rule or TextRatio(options.ratio, text.most_left_out)
            ratios = [rule.choose(static) for static in found]
            figures = (text.left_out, text.spread, shares.min(), shares.max())
            shown = " | ".join(f"{value:.3f}" for value in figures)
            print(f"| {name} | {len(found)} | {shown} | {min(ratios):.1%} to {max(ratios):.1%} |", flush=True)


if __name__ == "__main__":
    main()
