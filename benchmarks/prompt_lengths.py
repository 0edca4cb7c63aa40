"""Whether blending gains with a prompt's length: CPU time and peak memory against full recompute, chunk count by chunk count.

python benchmarks/prompt_lengths.py [--counts 2,6,12,24,48] [--methods full,prefix,blend] [--model llama:8x256] [--repeat N]

One thread, and the process's CPU time instead of wall time: on a machine that others use, too, only that can be compared.
Peak memory is the process's, weights and the chunks' stored KV included; ``prompt KV`` is what the prompt's cache takes.
"""

from __future__ import annotations

import argparse
import time

import torch

from cacheblend_rag.bench.measure import PeakMemory, median, take_turns
from cacheblend_rag.bench.setup import BenchModel, Workbench, name_methods
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.prompt import TokenizedPrompt

ONE_TOKEN = SamplingParams(max_tokens=1)


def measure(place: Workbench, prompt: TokenizedPrompt, names: list[str], repeat: int) -> None:
    methods = name_methods(BlendSettings(0.15, "hkvd"))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0)
    memory = PeakMemory(torch.device("cpu"))
    for number in range(repeat):
        for name in take_turns(names, number):
            memory.restart()
            begin = time.process_time()
            place.engine.generate(prompt, ONE_TOKEN, methods[name])
            seconds[name].append(time.process_time() - begin)
            peak[name] = max(peak[name], memory.nbytes() or 0)
    spent = {name: median(times) for name, times in seconds.items()}
    kv = sum(entry.nbytes for entry in place.engine.store.entries())
    print(
        f"{len(prompt.spans)} chunks, {len(prompt.token_ids)} tokens, prompt KV {kv / 1e6:.0f} MB: "
        + "; ".join(
            f"{name} {spent[name]:.2f} s, {spent['full'] / spent[name]:.2f}x, peak {peak[name] / 1e6:.0f} MB"
            for name in names
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="2,6,12,24,48", help="numbers of chunks of 512 tokens")
    parser.add_argument(
        "--methods", default="full,prefix,blend", help="of full, prefix, reuse and blend; full is needed"
    )
    parser.add_argument("--model", default="llama:8x256", help="shape of random weights, or 'bundled'")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    names = options.methods.split(",")
    shape = None if options.model == "bundled" else options.model
    for count in map(int, options.counts.split(",")):
        with Workbench.open(BenchModel(random_weights=shape, device="cpu", threads=1)) as place:
            chunks = place.random_chunks(count, 512, 0)
            place.engine.precompute(chunks)
            for name in names:  # warm up, on a short prompt
                short = place.prompt(chunks[:2], 32, 0)
                place.engine.generate(short, ONE_TOKEN, name_methods(BlendSettings(0.15, "hkvd"))[name])
            measure(place, place.prompt(chunks, 32, 0), names, options.repeat)


if __name__ == "__main__":
    main()
