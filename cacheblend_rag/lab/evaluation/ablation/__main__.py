"""Runs `python -m cacheblend_rag.lab.evaluation.ablation static|hkvd`: measures, prints tables and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.lab.doctor.workbench import BenchModel, Workbench
from cacheblend_rag.lab.evaluation.ablation.deviation import RATIOS, ablate_deviation
from cacheblend_rag.lab.evaluation.ablation.prompts import data_prompts, demo_prompts, random_prompts
from cacheblend_rag.lab.evaluation.ablation.static import ablate_static
from cacheblend_rag.lab.evaluation.ablation.tally import table_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Run; Markdown tables go to stderr, JSON to stdout."""
    parser = argparse.ArgumentParser(description="What the token choice rests on.")
    parser.add_argument("of", choices=("static", "hkvd"), help="the policy to take apart")
    parser.add_argument("--model", help="as of the commands (default: the bundled model)")
    parser.add_argument("--random-weights", help="shape of a random model, as llama:16x512")
    parser.add_argument("--dataset", default="demo", help="demo, or a data set as `cacheblend eval` knows it")
    parser.add_argument("--data", type=Path, help="where the named data sets are")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of random chunks; others have up to 512")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--check-layer", type=int, help="of hkvd (default: the profile's last)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    model = BenchModel(model=options.model, random_weights=options.random_weights, threads=options.threads)
    with Workbench.open(model) as place:
        engine = place.engine
        assert isinstance(engine, TransformersEngine)
        if options.random_weights:
            prompts = random_prompts(place, options.prompts, options.chunks, options.chunk_tokens)
        elif options.dataset == "demo":
            prompts = demo_prompts(engine, options.prompts, options.seed, options.chunks)
        else:
            prompts = data_prompts(engine, options.dataset, options.data, options.prompts, options.seed, options.chunks)
        layer = options.check_layer or engine.profile.check_layers[-1]
        ablate = ablate_static if options.of == "static" else ablate_deviation
        result = ablate(engine, prompts, layer, options.ratios, lambda line: sys.stderr.write(f"{line}\n"))
        data = "random tokens" if options.random_weights else options.dataset
        about = {"model": place.label, "data": data, "prompts": len(prompts), "check_layer": layer}
    sys.stderr.write(table_of(result["kl"], "kl", "KL, nats") + "\n\n")
    sys.stderr.write(table_of(result["agreement"], "agreement", "agreement") + "\n")
    sys.stdout.write(json.dumps({**about, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
