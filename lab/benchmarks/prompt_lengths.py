"""Measures CPU time and peak memory of blending against full recompute, over lengths of prompts.

python lab/benchmarks/prompt_lengths.py [--engine vllm] [--counts 2,6,12,24,48] [--methods full,prefix,blend] [--policy P]
    [--ratio R] [--model llama:8x256] [--repeat N]

The benchmark uses one thread, and CPU time instead of wall time, which cannot be compared on a shared machine. CPU time
and peak memory cover the benchmark's process and, on vLLM, the engine's processes. Memory includes weights and the
chunks' stored KV, and on vLLM all pages of the paged cache that were ever used; ``prompt KV`` is the size of the
prompt's cache.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import median

import psutil
import torch

from cacheblend_lab.bench.workbench import BenchModel, name_methods, open_workbench
from cacheblend_lab.measure import PeakMemory, take_turns
from cacheblend_lab.policies import rank_for
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.frameworks.sharing import EngineName
from cacheblend_rag.prompts.prompt import TokenizedPrompt

ONE_TOKEN = SamplingParams(max_tokens=1)
CHUNK, QUESTION, PAGE = 512, 32, 128


class Meter:
    """Measures CPU time and peak memory of the current process and its child processes."""

    def __init__(self) -> None:
        me = psutil.Process()
        self._below = me.children(recursive=True)
        self._all = [me, *self._below]
        self._own = PeakMemory(torch.device("cpu"))
        self._seconds = 0.0

    def restart(self) -> None:
        self._own.restart()
        for process in self._below:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
        self._seconds = self._spent()

    def _spent(self) -> float:
        times = [process.cpu_times() for process in self._all]
        return sum(each.user + each.system for each in times)

    def seconds(self) -> float:
        return self._spent() - self._seconds

    def peak_nbytes(self) -> int:
        return (self._own.nbytes() or 0) + sum(map(_peak, self._below))


def _peak(process: psutil.Process) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text(encoding="ascii"))
    return 0 if found is None else int(found[1]) * 1024


def measure(place: Workbench, prompt: TokenizedPrompt, names: list[str], blend: BlendSettings, repeat: int) -> None:
    methods = name_methods(blend)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0)
    meter = Meter()
    for number in range(repeat):
        for name in take_turns(names, number):
            place.forget()
            meter.restart()
            place.engine.generate(prompt, ONE_TOKEN, methods[name])
            seconds[name].append(meter.seconds())
            peak[name] = max(peak[name], meter.peak_nbytes())
    spent = {name: median(times) for name, times in seconds.items()}
    kv = sum(entry.nbytes for entry in place.engine.store.entries())
    most = 1.2 * (peak["full"] + kv)
    print(
        f"{len(prompt.spans)} chunks, {len(prompt.token_ids)} tokens, prompt KV {kv / 1e6:.0f} MB: "
        + "; ".join(
            f"{name} {spent[name]:.2f} s, {spent['full'] / spent[name]:.2f}x, peak {peak[name] / 1e6:.0f} MB "
            f"({peak[name] / most:.0%} of 1.2 x (full + prompt KV))"
            for name in names
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--counts", default="2,6,12,24,48", help="numbers of chunks of 512 tokens")
    parser.add_argument(
        "--methods", default="full,prefix,blend", help="of full, prefix, reuse and blend; full is needed"
    )
    parser.add_argument("--policy", default="hkvd")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--model", default="llama:8x256", help="shape of random weights, or 'bundled'")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    names = options.methods.split(",")
    engine: EngineName = options.engine
    model = BenchModel(
        random_weights=None if options.model == "bundled" else options.model, device="cpu", threads=1, engine=engine
    )
    blend = BlendSettings(options.ratio, options.policy)
    for count in map(int, options.counts.split(",")):
        context = count * CHUNK + 2 * QUESTION
        # The cache has room for one prompt only: vLLM uses all pages in turn, so a larger cache would use more memory.
        with open_workbench(model, context=context, pages=context // PAGE + 3) as place:
            chunks = place.random_chunks(count, CHUNK, 0)
            rank_for(place.engine, blend)
            place.engine.precompute(chunks)
            prompt = place.prompt(chunks, QUESTION, 0)
            for name in names:  # warm up; vLLM needs the whole prompt to touch every page and have all KV in RAM
                short = prompt if engine == "vllm" else place.prompt(chunks[:2], QUESTION, 0)
                place.forget()
                place.engine.generate(short, ONE_TOKEN, name_methods(blend)[name])
            measure(place, prompt, names, blend, options.repeat)


if __name__ == "__main__":
    main()
