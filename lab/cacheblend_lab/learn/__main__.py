"""Runs `python -m cacheblend_lab.learn`, a `cacheblend learn` that does not need the command line's packages."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cacheblend_lab.learn.learn import Sizes, learn
from cacheblend_lab.learn.training import LearnSettings
from cacheblend_rag.engines.models import dtype_named


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and train a writer; progress goes to stderr."""
    parser = argparse.ArgumentParser(description="Train a KV writer.")
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", nargs="+", required=True)
    parser.add_argument("--questions", nargs="*", default=[])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--start", type=Path)
    parser.add_argument("--note", default="")
    for name, usual in (("rank", 16), ("checks", 12), ("patience", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, usual_rate in (("rate", 5e-4), ("recomputed", 0.5), ("ratio", 0.15)):
        parser.add_argument(f"--{name}", type=float, default=usual_rate)
    for name in ("prompt-tokens", "batch-tokens", "answers", "requests", "looked"):
        parser.add_argument(f"--{name}", type=int)
    o = parser.parse_args(arguments)
    settings = LearnSettings(
        o.minutes, o.steps, o.rank, o.rate, o.recomputed, o.ratio, o.checks, o.patience, seed=o.seed
    )
    sizes = Sizes(o.prompt_tokens, o.batch_tokens, o.answers, o.requests, o.looked)
    begin = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - begin:6.1f} s] {line}\n")

    _, saved = learn(
        o.model,
        o.out,
        o.documents,
        o.questions,
        settings,
        sizes,
        device=o.device,
        dtype=dtype_named(o.dtype) if o.dtype else None,
        start=o.start,
        note=o.note,
        say=say,
    )
    say(f"saved in {saved}" if saved else "not better, not saved")


if __name__ == "__main__":
    main()
