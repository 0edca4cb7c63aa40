"""Runs `python -m cacheblend_rag.lab.learn.measure prepare|run`: prompts of data sets, and how near blends of them come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.engines.models import dtype_named, end_tokens
from cacheblend_rag.engines.transformers.owner import device_named, load_model
from cacheblend_rag.lab.doctor.measure import describe_machine
from cacheblend_rag.lab.learn.adapter import load_writing_copy
from cacheblend_rag.lab.learn.blend import BatchBlender
from cacheblend_rag.lab.learn.frontier import (
    POLICIES,
    RATIOS,
    FrontierPrompt,
    measure_frontier,
    read_prompts,
    summarise,
    table_of,
    write_prompts,
)
from cacheblend_rag.lab.learn.lesson import Lesson


def main(arguments: Sequence[str] | None = None) -> None:
    """Run; the table goes to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description="KL and agreement against compute, with a KV writer and without.")
    jobs = parser.add_subparsers(required=True)
    prepare = jobs.add_parser("prepare", help="make prompts of data sets; needs the retrieval model")
    prepare.add_argument("sets", nargs="+", help="NAME=FILE, files as `cacheblend eval` reads them")
    prepare.add_argument("--k", type=int, default=6)
    prepare.add_argument("--chunk-tokens", type=int, default=256)
    prepare.add_argument("--seed", type=int, default=1)
    prepare.set_defaults(job=_prepare)
    run = jobs.add_parser("run", help="measure")
    run.add_argument("--writer", type=Path)
    run.add_argument("--device")
    run.add_argument("--dtype")
    run.add_argument("--threads", type=int)
    run.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    run.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    run.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    run.set_defaults(job=_run)
    for job, usual in ((prepare, 200), (run, None)):
        job.add_argument("--model", help="directory or hub name (default: the bundled model)")
        job.add_argument("--file", type=Path, required=True, help="the prompts")
        job.add_argument("--prompts", type=int, default=usual, help="most of each data set")
    options = parser.parse_args(arguments)
    options.job(options)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _prepare(o: argparse.Namespace) -> None:
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.lab.datasets import load_data_set
    from cacheblend_rag.lab.evaluation.prepare import Preparation, Preparer, set_header
    from cacheblend_rag.prompts.prompt import tokenize

    found = []
    with TransformersEngine(o.model, device="cpu") as engine:
        for spec in o.sets:
            name, _, file = spec.partition("=")
            samples = load_data_set(file, None, 2 * o.prompts, o.seed, engine.tokenizer).samples
            set_header(engine, samples)
            preparer = Preparer(engine, Preparation(k=o.k, chunk_tokens=o.chunk_tokens))
            made: list[FrontierPrompt] = []
            for sample in samples:
                if len(made) == o.prompts:
                    break
                prompt = tokenize(preparer.case(sample).prompt, engine.tokenizer, engine.registry)
                if len(prompt.spans) > 1:  # one chunk alone is exact
                    spans = tuple((span.start, span.end) for span in prompt.spans)
                    made.append(FrontierPrompt(name, engine.header_ids, spans, prompt.token_ids, sample.group))
            _say(f"{name}: {len(made)} prompts of {sum(len(each.ids) for each in made) / max(1, len(made)):.0f} tokens")
            found += made
    write_prompts(o.file, found)


def _run(o: argparse.Namespace) -> None:
    if o.threads:
        torch.set_num_threads(o.threads)
    device = device_named(o.device)
    usual = torch.bfloat16 if device.type == "cuda" else None
    loaded = load_model(o.model, None, device, dtype_named(o.dtype) if o.dtype else usual)
    writing: Any = None if o.writer is None else load_writing_copy(loaded.model, o.writer)
    blender, config = BatchBlender(loaded.model), loaded.model.config.get_text_config()
    window = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    probe = probe_ids(loaded.tokenizer, int(config.vocab_size), window)
    ends = end_tokens(config, getattr(loaded.model, "generation_config", None), loaded.tokenizer)
    prompts, begin = read_prompts(o.file, o.prompts), time.monotonic()

    def progress(done: int) -> None:
        if done % 20 == 0:
            _say(f"{done} of {len(prompts)} prompts, {time.monotonic() - begin:.0f} s")

    batch_tokens = 65536 if device.type == "cuda" else 4096
    found = measure_frontier(
        Lesson(blender, writing), prompts, probe, ends, batch_tokens, progress, o.ratios, o.policies
    )
    rows = summarise(found)
    sys.stdout.write(table_of(rows) + "\n")
    if o.out is not None:
        about = {
            "writer": o.writer and o.writer.name,
            "dtype": str(loaded.model.dtype),
            "machine": describe_machine(device),
        }
        o.out.write_text(
            json.dumps({**about, "summary": rows, "prompts": [asdict(each) for each in found]}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
