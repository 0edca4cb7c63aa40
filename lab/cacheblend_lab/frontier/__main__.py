"""Runs `python -m cacheblend_lab.frontier prepare|run|summarise`: makes prompts of data sets, and measures blends of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend_lab.frontier.frontier import COMPARED, RATIOS, Frontier
from cacheblend_lab.frontier.measured import append_measured, differences, read_measured, summarise, table_of
from cacheblend_lab.frontier.prompts import describe, prepare_prompts, read_prompts, write_prompts
from cacheblend_lab.frontier.weights import WEIGHTS, coarser
from cacheblend_lab.learn.adapter import load_writing_copy
from cacheblend_lab.learn.blend import BatchBlender
from cacheblend_lab.learn.lesson import Lesson
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.engines.models import dtype_named, end_tokens
from cacheblend_rag.engines.transformers.owner import device_named, load_model


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the table goes to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(description="Nearness to full recompute against compute, of every policy.")
    jobs = parser.add_subparsers(required=True)
    prepare = jobs.add_parser("prepare", help="make prompts of data sets; needs the retrieval model")
    prepare.add_argument("sets", nargs="+", help="NAME=FILE, files as `cacheblend eval` reads them")
    prepare.add_argument("--k", type=int, default=6)
    prepare.add_argument("--chunk-tokens", type=int, default=256)
    prepare.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="each draws an equal part")
    prepare.set_defaults(job=_prepare)
    run = jobs.add_parser("run", help="measure; the same command goes on where it was stopped")
    run.add_argument("--writer", type=Path)
    run.add_argument("--behind", action="store_true", help="measure the model's KV behind the ranking's probe, too")
    run.add_argument("--device")
    run.add_argument("--dtype", default="float32", help="in which the truth is computed, and every blend")
    run.add_argument("--threads", type=int)
    run.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    run.add_argument("--policies", nargs="+", default=list(COMPARED), help="full reuse is measured in any case")
    run.add_argument(
        "--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS), help="full recompute by these, too"
    )
    run.add_argument("--only", nargs="+", default=[], help="of these data sets")
    run.add_argument("--batch-tokens", type=int, default=4096, help="computed at once; a GPU takes more")
    run.add_argument(
        "--block", type=int, help="prompts answered together, the longest first (default: one of each set)"
    )
    run.add_argument("--out", type=Path, required=True, help="a file of JSON lines, to which every prompt is appended")
    run.set_defaults(job=_run)
    for job, usual in ((prepare, 200), (run, None)):
        job.add_argument("--model", help="directory or hub name (default: the bundled model)")
        job.add_argument("--file", type=Path, required=True, help="the prompts")
        job.add_argument("--prompts", type=int, default=usual, help="most of each data set")
    sums = jobs.add_parser("summarise", help="means with intervals of what was measured")
    sums.add_argument("files", type=Path, nargs="+", help="what `run` wrote")
    sums.add_argument("--out", type=Path, help="where to write the means, as JSON")
    sums.set_defaults(job=_summarise)
    options = parser.parse_args(arguments)
    options.job(options)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _prepare(o: argparse.Namespace) -> None:
    from cacheblend_lab.evaluation.prepare import Preparation
    from cacheblend_rag.engines.transformers import TransformersEngine

    found = []
    with TransformersEngine(o.model, device="cpu") as engine:
        for spec in o.sets:
            name, _, file = spec.partition("=")
            how = Preparation(k=o.k, chunk_tokens=o.chunk_tokens)
            made = prepare_prompts(engine, name, file, o.prompts, o.seeds, how)
            _say(describe(name, made))
            found += made
    write_prompts(o.file, found)


def _run(o: argparse.Namespace) -> None:
    if o.threads:
        torch.set_num_threads(o.threads)
    device = device_named(o.device)
    # A GPU then computes with ten bits of mantissa; the row of full-recompute shows the resulting noise.
    torch.set_float32_matmul_precision("high")
    loaded = load_model(o.model, None, device, dtype_named(o.dtype))
    writing: Any = None if o.writer is None else load_writing_copy(loaded.model, o.writer)
    blender, config = BatchBlender(loaded.model), loaded.model.config.get_text_config()
    window = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    probe = probe_ids(loaded.tokenizer, int(config.vocab_size), window)
    ends = end_tokens(config, getattr(loaded.model, "generation_config", None), loaded.tokenizer)
    frontier = Frontier(
        Lesson(blender, writing),
        probe,
        ends,
        o.batch_tokens,
        o.ratios,
        o.policies,
        coarser(loaded.model, o.weights),
        o.behind,
    )
    done = {each.prompt for each in read_measured([o.out])}
    prompts = [each for each in read_prompts(o.file, o.prompts, o.only) if each.key not in done]
    begin, block = time.monotonic(), o.block or len({each.data for each in prompts})
    _say(f"{len(done)} prompts are measured, {len(prompts)} are left; {describe_machine(device)}")
    for at in range(0, len(prompts), block or 1):
        for number, found in enumerate(frontier.measure(prompts[at : at + block]), at + 1):
            append_measured(o.out, found)
            if number % 10 == 0:
                _say(f"{number} of {len(prompts)} prompts, {time.monotonic() - begin:.0f} s")


def _summarise(o: argparse.Namespace) -> None:
    found = read_measured(o.files)
    rows, compared = summarise(found), summarise(differences(found))
    sys.stdout.write(table_of(rows) + "\n")
    if compared:
        sys.stdout.write(f"\nDifferences on the same prompts:\n\n{table_of(compared, '+')}\n")
    if o.out is not None:
        o.out.write_text(json.dumps(rows + compared), encoding="utf-8")


if __name__ == "__main__":
    main()
