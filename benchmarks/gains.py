"""Counts what blends gain in many cases, by what `predict.py` counts: nothing here is measured on a GPU.

python benchmarks/gains.py

Two GPUs, 8B and 70B on four of them, prompts of 3k to 32k tokens, four places of KV; a blend's passes are replayed as graphs.
An H100 differs from an H200 by its memory, 3.0e12 bytes/s; four GPUs halve and halve again what each computes, reads
and loads, and add up what they have twice a layer, at 300e9 bytes/s and 10 us. KV "in the GPU" is the bound: no tier of ours is
there. A disk gives 2.7e9 bytes/s, as four threads have read and checked it beside that H200, to all GPUs together.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.predict import BF16, METHODS, QUESTION, Device, Shape, counted, quiet, with_graphs

CHUNK_TOKENS = 512
_LINK, _REDUCE_S, _DISK = 300e9, 10e-6, 2.7e9
_70B = Shape(80, 8192 * (2 * 8192 + 2048) + 3 * 8192 * 28672, 128256 * 8192, 8192, 2048, 128)


def gains(shape: Shape, device: Device, chunks: int, chunk_tokens: int, codec: str, ranks: int = 1) -> dict[str, float]:
    """Return how much sooner than full recompute each method's first token is, passes replayed, on ``ranks`` GPUs together."""
    # What is launched does not depend on how long chunks are.
    counts, groups = counted(chunks, 16, shape.layers, codec, replayed=True)
    prompt, stale = chunks * chunk_tokens + QUESTION, (chunks - 1) * chunk_tokens

    def seconds(tokens: int, keys: float, layers: int, ends: bool) -> float:
        flops, moved = shape.a_pass(tokens, keys, layers, ends)
        reduced = 2 * layers * (_REDUCE_S + 2 * BF16 * tokens * shape.query_width / _LINK) if ranks > 1 else 0.0
        return max(flops / device.flops, moved / device.memory) / ranks + reduced

    (full,) = (seconds(*each) for each in shape.passes(METHODS["full recompute"], prompt, chunks, chunk_tokens))
    host = shape.kv_bytes(codec) * chunks * chunk_tokens / ranks
    found = {}
    for name, settings in METHODS.items():
        if settings.reuse == "off" or settings.policy == "hkvd":
            continue
        ratio = settings.ratio
        assert isinstance(ratio, float)
        asked = shape.passes(settings, round(ratio * stale) + QUESTION, chunks, chunk_tokens)
        passes = [seconds(*each) for each in asked]
        found[name] = full / with_graphs(device, counts[name], groups, passes, host)
    return found


def main() -> None:
    """Print the gains of every case."""
    places = {
        "in the GPU": (float("inf"), "none"),
        "RAM": (50e9, "none"),
        "RAM, int8": (50e9, "int8"),
        "disk": (_DISK, "none"),
    }
    gpus = {"H100": 3.0e12, "H200": 4.3e12}
    print("| model | prompt | blend |" + "".join(f" {gpu}: {place} |" for gpu in gpus for place in places))
    print("|---|--:|---|" + "--:|" * len(gpus) * len(places))
    for model, shape, ranks in (("8B", Shape.of("llama-3.1-8b"), 1), ("70B, four GPUs", _70B, 4)):
        for chunks in (6, 20, 64):
            cells = [
                gains(shape, Device(770e12, memory, bus, 20e-6), chunks, CHUNK_TOKENS, codec, ranks)
                for memory in gpus.values()
                for bus, codec in {**places, "disk": (_DISK / ranks, "none")}.values()
            ]
            for name in list(cells[0])[:-1]:  # full reuse is no blend
                row = "".join(f" {cell[name]:.1f}x |" for cell in cells)
                print(f"| {model} | {chunks * CHUNK_TOKENS + QUESTION:,} | {name} |{row}")


if __name__ == "__main__":
    with quiet():
        main()
