"""Profiles a blend and a full prefill: the slowest kernels, launches, and how busy the device is.

python lab/benchmarks/profile_blend.py [--random-weights SHAPE | --model DIR] [--device D] [--dtype T] [--chunks N]
    [--policy P] [--ratio R] [--trace FILE] [--json]

On a GPU ``busy`` is the share of the elapsed time in which a kernel ran, and ``launches`` counts the driver's launch calls;
on a CPU, operators are listed instead. ``--trace`` writes the blend as a Chrome trace.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cacheblend_lab.bench import BenchModel, Workbench, open_workbench
from cacheblend_lab.bench.workbench import name_methods
from cacheblend_lab.policies import rank_for
from cacheblend_rag import BlendSettings, SamplingParams

LISTED = 15


def profile_prompt(place: Workbench, settings: BlendSettings, chunks: int, trace: Path | None) -> dict[str, Any]:
    """Return a profile of one prompt's time to first token, after a warm-up run and a run without the profiler."""
    prompt = place.prompt(place.random_chunks(chunks, 512, 0), 32, 0)
    on_gpu = place.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def run() -> float:
        place.forget()
        begin = time.perf_counter()
        place.engine.generate(prompt, SamplingParams(max_tokens=1), settings)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    run()
    plain_s = run()
    with profile(activities=activities) as profiled:
        profiled_s = run()
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    averages = profiled.key_averages()
    # On a GPU, only kernels count; on a CPU, operators.
    ran = [e for e in averages if e.self_device_time_total] if on_gpu else list(averages)
    took = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 for e in ran}
    counts = {e.key: e.count for e in averages}
    found: dict[str, Any] = {"ttft_s": plain_s, "profiled_s": profiled_s}
    if on_gpu:
        found["launches"] = sum(n for key, n in counts.items() if "LaunchKernel" in key)
        found["synchronisations"] = sum(n for key, n in counts.items() if "Synchronize" in key)
        found["busy"] = sum(took.values()) / profiled_s
    slowest = sorted(took, key=lambda key: -took[key])[:LISTED]
    found["slowest"] = [{"name": key, "s": took[key], "count": counts[key]} for key in slowest]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights")
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--policy", default="static")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    options = parser.parse_args()
    blend = BlendSettings(options.ratio, options.policy)
    with open_workbench(BenchModel(options.model, options.random_weights, options.device, options.dtype)) as place:
        rank_for(place.engine, blend)
        place.engine.precompute(place.random_chunks(options.chunks, 512, 0))
        methods = name_methods(blend)
        found = {
            name: profile_prompt(place, methods[name], options.chunks, options.trace if name == "blend" else None)
            for name in ("full", "blend")
        }
        head = place.head(blend, chunks=options.chunks, chunk_tokens=512, question_tokens=32)
    if options.json:
        print(json.dumps({**head, "methods": found}, indent=2))
        return
    for name, method in found.items():
        counted = ", ".join(
            f"{key} {method[key]:.3g}" for key in ("launches", "synchronisations", "busy") if key in method
        )
        print(f"{name}: {1000 * method['ttft_s']:.2f} ms{', ' if counted else ''}{counted}")
        for one in method["slowest"]:
            print(f"  {1000 * one['s']:9.2f} ms  {one['count']:6} x  {one['name'][:90]}")


if __name__ == "__main__":
    main()
