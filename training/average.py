"""Average a finished model with one it began from: `python -m training.average MODEL OTHER --share 0.4 --out FOLDER`.

What training on has taught, and what it has made the model forget, both grow with the distance between the two; somewhere in
between most of the one is there and little of the other.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

_WEIGHTS = "model.safetensors"


def average(model: Path, other: Path, share: float, out: Path) -> None:
    """Write `model` to `out`, its weights a share of `other`'s and the rest its own; both have the same shape and tokenizer."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(_WEIGHTS))
    own, others = load_file(model / _WEIGHTS), load_file(other / _WEIGHTS)
    mean = {
        name: (share * others[name].float() + (1 - share) * tensor.float()).to(tensor.dtype)
        for name, tensor in own.items()
    }
    with safe_open(model / _WEIGHTS, framework="pt") as opened:
        facts = dict(opened.metadata())
    digest = xxhash.xxh3_128((other / _WEIGHTS).read_bytes()).hexdigest()
    facts["averaged"] = f"{share:.0%} of the model with xxh3-128 {digest}"
    save_file(mean, out / _WEIGHTS, metadata=facts)
    (out / _WEIGHTS).chmod(0o644)  # the writer leaves it readable by its owner only


def main(arguments: Sequence[str] | None = None) -> None:
    """Average two models."""
    parser = argparse.ArgumentParser(description="Average a finished model with another one.")
    parser.add_argument("model", type=Path, help="folder of the model whose tokenizer and origin the average has")
    parser.add_argument("other", type=Path, help="folder of the other one")
    parser.add_argument("--share", type=float, required=True, help="of the other model's weights, 0 to 1")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    if not 0 <= options.share <= 1:
        parser.error(f"--share is {options.share}; give a number from 0 to 1")
    average(options.model, options.other, options.share, options.out)


if __name__ == "__main__":
    main()
