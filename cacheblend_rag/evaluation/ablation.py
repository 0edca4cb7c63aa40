"""What the token choice rests on, one thing at a time: `python -m cacheblend_rag.evaluation.ablation`.

K, V or both for the deviation; chunks computed behind the header or alone; each chunk's first tokens forced or not. Measured by
the KL, in nats, between full recompute and blend, mean over the answer's first tokens and over prompts (as calibration does).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cacheblend_rag.bench.setup import BenchModel, Workbench
from cacheblend_rag.blending.calibration.measurement import PromptMeasurement, Scored
from cacheblend_rag.blending.fusor import BlendSchedule
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.evaluation.datasets import demo_samples
from cacheblend_rag.evaluation.inspector import PromptInspector
from cacheblend_rag.evaluation.intervals import mean_interval
from cacheblend_rag.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.prompts.prompt import TokenizedPrompt, tokenize

RATIOS = (0.02, 0.05, 0.15)
SINKS = 2


class _WithSinks(SelectionPolicy):
    """HKVD with each chunk's first tokens forced."""

    name = "hkvd with sinks"
    needs_deviation = True

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        assert candidates.deviation is not None
        score = candidates.deviation.masked_fill(candidates.offset < SINKS, float("inf"))
        mask = torch.zeros_like(candidates.positions, dtype=torch.bool)
        mask[torch.argsort(score, descending=True, stable=True)[:count]] = True
        return mask


def ablate(
    engine: TransformersEngine,
    prompts: Sequence[TokenizedPrompt],
    check_layer: int,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Return ``{variant: {ratio: {"kl", "low", "high"}}}``; ``none`` is full KV reuse, ``oracle`` knows all layers.

    The prompts should not share chunks: intervals resample them one by one. Fewer than five have none: its ends are None.

    Raises:
        ModelError: The model is not blended.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")
    say = progress or (lambda line: None)
    schedule = BlendSchedule((check_layer,), (1.0,))
    found: dict[str, dict[float, list[float]]] = {}

    def note(name: str, ratio: float, kl: float) -> None:
        found.setdefault(name, {}).setdefault(ratio, []).append(kl)

    end = getattr(engine.tokenizer, "eos_token_id", None)
    for number, prompt in enumerate(prompts, 1):
        say(f"prompt {number} of {len(prompts)}")
        measurement = PromptMeasurement(engine.subject(), engine.rope, engine.header_ids, prompt, end)
        alone = PromptMeasurement(engine.subject(), engine.rope, (), prompt, end)
        note("none", 0.0, measurement.kl(policy("full-reuse"), 0.0, schedule))
        note("none, chunks without header", 0.0, alone.kl(policy("full-reuse"), 0.0, schedule))
        k, v = PromptInspector(engine, prompt).measure_deviations()
        for ratio in RATIOS:
            # The dense pass computes exactly the full prefill's KV, so these scores are what the check layer would see.
            note("hkvd, K and V", ratio, measurement.kl(policy("hkvd"), ratio, schedule))
            note("hkvd, K alone", ratio, measurement.kl(Scored(k[check_layer]), ratio, schedule))
            note("hkvd, V alone", ratio, measurement.kl(Scored(v[check_layer]), ratio, schedule))
            note("hkvd, first tokens forced", ratio, measurement.kl(_WithSinks(), ratio, schedule))
            note("hkvd, chunks without header", ratio, alone.kl(policy("hkvd"), ratio, schedule))
            note("oracle", ratio, measurement.kl(Scored(measurement.oracle), ratio, schedule))
            note("random", ratio, measurement.kl(policy("random"), ratio, schedule))
    return {
        name: {f"{ratio:g}": _with_interval(values) for ratio, values in by_ratio.items()}
        for name, by_ratio in found.items()
    }


def _with_interval(values: list[float]) -> dict[str, float | None]:
    low, high = mean_interval(values, [""] * len(values)) or (None, None)
    return {"kl": float(np.mean(values)), "low": low, "high": high}


def random_prompts(place: Workbench, count: int, chunks: int, chunk_tokens: int) -> list[TokenizedPrompt]:
    """Return prompts of random tokens, for models of random weights."""
    return [
        place.prompt(place.random_chunks(chunks, chunk_tokens, 1000 + number), 16, number) for number in range(count)
    ]


def demo_prompts(engine: TransformersEngine, count: int, seed: int, chunks: int) -> list[TokenizedPrompt]:
    """Return one prompt per generated context, about references across chunks."""
    samples = demo_samples(engine.tokenizer, 8 * count, seed, kinds=("cross", "two_hop_cross"), chunks=chunks)
    set_header(engine, samples)
    first = list({sample.group: sample for sample in reversed(samples)}.values())[::-1][:count]
    preparer = Preparer(engine, Preparation(k=chunks))
    return [tokenize(preparer.case(sample).prompt, engine.tokenizer, engine.registry) for sample in first]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description="What the token choice rests on.")
    parser.add_argument("--model", help="directory or hub name (default: the bundled model)")
    parser.add_argument("--random-weights", help="shape of a random model, as llama:16x512")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of random chunks; generated ones have 512")
    parser.add_argument("--check-layer", type=int, help="default: the profile's last")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    model = BenchModel(model=options.model, random_weights=options.random_weights, threads=options.threads)
    with Workbench.open(model) as place:
        engine = place.engine
        assert isinstance(engine, TransformersEngine)
        if options.random_weights:
            prompts = random_prompts(place, options.prompts, options.chunks, options.chunk_tokens)
        else:
            prompts = demo_prompts(engine, options.prompts, options.seed, options.chunks)
        layer = options.check_layer or engine.profile.check_layers[-1]
        result = ablate(engine, prompts, layer, lambda line: sys.stderr.write(f"{line}\n"))
        about = {"model": place.label, "prompts": len(prompts), "check_layer": layer}
    sys.stdout.write(json.dumps({**about, "kl": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
