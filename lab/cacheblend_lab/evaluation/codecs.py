"""Measures how much space KV codecs save and how they change answers: `python -m cacheblend_lab.evaluation.codecs`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

from cacheblend_lab.bench.throttled import ThrottledDisk
from cacheblend_lab.bench.workbench import BenchModel, open_workbench
from cacheblend_lab.datasets import demo_samples
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_lab.intervals import share_interval
from cacheblend_lab.samples import Sample
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.codec import LOSSY, through
from cacheblend_rag.store.kv import ChunkKV
from cacheblend_rag.store.kvfile import EntryFormat

ALL: Final = ("none", LOSSY)
Say = Callable[[str], object]


def measure_agreement(engine: TransformersEngine, samples: Sequence[Sample], chunks: int, say: Say) -> dict[str, Any]:
    """Answer questions by blends of exact KV and of KV decoded from the lossy codec.

    Returns:
        For each codec ``bytes_per_token``; for the lossy codec also ``agreement``, the share of answers that are equal
        token for token, with its 95% interval ``low`` and ``high``.
    """
    set_header(engine, samples)
    preparer = Preparer(engine, Preparation(k=chunks))
    same: list[float] = []
    sizes, tokens, answered = dict.fromkeys(ALL, 0), 0, 0
    for _, group in groupby(samples, lambda sample: sample.group):
        cases = [preparer.case(sample) for sample in group]
        exact = engine.store = MemoryStore()
        engine.precompute(cases[0].chunks)
        entries = [(entry.key, kv) for entry in exact.entries() if isinstance(kv := exact.get(entry.key), ChunkKV)]
        tokens += sum(kv.num_tokens for _, kv in entries)
        for name in ALL:
            written = EntryFormat(name)
            sizes[name] += sum(len(written.serialized(written.encode(key, kv))) for key, kv in entries)
        lossy = MemoryStore()
        for key, kv in entries:
            decoded = [through(LOSSY, layer) for layer in kv.layers]
            lossy.put(key, kv.whole(decoded))
        for case in cases:
            answers = []
            for engine.store in (exact, lossy):
                answers.append(engine.generate(case.prompt, SamplingParams(case.max_tokens)).token_ids)
            same.append(float(answers[0] == answers[1]))
        answered += len(cases)
        say(f"{answered} of {len(samples)} questions answered")
    groups = [sample.group for sample in samples]
    found: dict[str, Any] = {name: {"bytes_per_token": sizes[name] / tokens} for name in ALL}
    low, high = share_interval(same, groups)
    found[LOSSY] |= {"agreement": sum(same) / len(same), "low": low, "high": high}
    return found


def measure_time(
    place: Workbench, chunks: int, chunk_tokens: int, bytes_per_s: float, rounds: int, say: Say
) -> dict[str, Any]:
    """Blend one prompt of random chunks from a throttled tier of each codec, in turn.

    Returns:
        Medians by codec. ``load_s`` is the time of reading all stored KV of the chunks, and ``ttft_s`` the time to the
        prompt's first token. ``load_ratio`` and ``ttft_ratio`` are their quotients with the codec ``none`` in the same
        round.
    """
    engine = place.engine
    assert isinstance(engine, TransformersEngine)
    exact = engine.store = MemoryStore()
    given = place.random_chunks(chunks, chunk_tokens, 1)
    engine.precompute(given)
    prompt = place.prompt(given, 16, 1)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ALL}
    with tempfile.TemporaryDirectory(prefix="cacheblend-codecs-") as directory:
        stores = {name: ThrottledDisk(Path(directory) / name, bytes_per_s, name) for name in ALL}
        keys = [entry.key for entry in exact.entries()]
        for store in stores.values():
            for key in keys:
                if isinstance(kv := exact.get(key), ChunkKV):
                    store.put(key, kv)
        for number in range(rounds + 1):  # the first round warms up
            for name, store in stores.items():
                begin = time.perf_counter()
                for key in keys:
                    if (stored := store.get(key)) is not None:
                        stored.verify()
                load_s = time.perf_counter() - begin
                engine.store = store
                ttft_s = engine.generate(prompt, SamplingParams(1)).timings.ttft_s
                if number:
                    took[name].append((load_s, ttft_s))
            say(f"round {number} of {rounds}")
    found: dict[str, Any] = {}
    for name, each in took.items():
        found[name] = {}
        for at, what in enumerate(("load", "ttft")):
            found[name][f"{what}_s"] = median(pair[at] for pair in each)
            ratios = [pair[at] / base[at] for pair, base in zip(each, took["none"], strict=True)]
            found[name][f"{what}_ratio"] = median(ratios)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a table goes to stderr, JSON to stdout."""
    parser = argparse.ArgumentParser(description="What KV codecs save, whether answers stay the same, what they cost.")
    parser.add_argument("--model", help="as of the commands (default: the bundled model)")
    parser.add_argument("--random-weights", help="shape of a random model, as llama:16x512: time alone")
    parser.add_argument("--dtype")
    parser.add_argument("--questions", type=int, default=200, help="of the demo set, generated; 0 for time alone")
    parser.add_argument("--seed", type=int, default=1401)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--bandwidth", type=float, default=1e9, help="of the throttled tier, bytes per second")
    parser.add_argument("--rounds", type=int, default=5, help="of timing; 0 for none")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    say: Say = lambda line: sys.stderr.write(f"{line}\n")  # noqa: E731
    model = BenchModel(options.model, options.random_weights, dtype=options.dtype, threads=options.threads)
    found: dict[str, dict[str, Any]] = {name: {} for name in ALL}
    with open_workbench(model) as place:
        engine = place.engine
        assert isinstance(engine, TransformersEngine)
        settings = {name: value for name, value in vars(options).items() if value is not None}
        about = {"model": place.label, "dtype": str(place.dtype).removeprefix("torch."), "settings": settings}
        if options.questions and not options.random_weights:
            samples = demo_samples(
                engine.tokenizer,
                options.questions,
                options.seed,
                chunks=options.chunks,
                chunk_tokens=options.chunk_tokens,
            )
            for name, row in measure_agreement(engine, samples, options.chunks, say).items():
                found[name] |= row
        if options.rounds:
            timed = measure_time(place, options.chunks, options.chunk_tokens, options.bandwidth, options.rounds, say)
            for name, row in timed.items():
                found[name] |= row
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    rows = [["codec", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(f"{row[x]:.4g}" if x in row else "" for x in columns)] for name, row in found.items()]
    sys.stderr.write("".join(f"| {' | '.join(row)} |\n" for row in rows))
    sys.stdout.write(json.dumps({**about, "codecs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
