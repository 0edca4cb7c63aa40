"""Averages a model with the model it began from: `python -m training.average MODEL OTHER --share 0.4 --out FOLDER`.

Further training adds skills, and makes the model forget others; both effects grow with the distance between the two
models. An average can keep most of the new skills and lose few of the old ones.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from training.export import CONFIG_FILES, TOKENIZER_FILES, fingerprint, write_weights


def average(model: Path, other: Path, share: float, out: Path) -> None:
    """Write a copy of `model` to `out`, with the weights `share` * `other` + (1 - `share`) * `model`.

    Raises:
        ValueError: The two models differ in shape or tokenizer.
    """
    own, others = (load_file(folder / "model.safetensors") for folder in (model, other))
    shapes, beside = ({name: tensor.shape for name, tensor in each.items()} for each in (own, others))
    if unlike := sorted({name for name, _ in shapes.items() ^ beside.items()}):
        raise ValueError(f"{model} and {other} differ in shape, first in {unlike[0]}: average models of one run alone")
    if any((model / name).read_bytes() != (other / name).read_bytes() for name in TOKENIZER_FILES):
        raise ValueError(f"{model} and {other} have different tokenizers: a token of one means another one there")
    out.mkdir(parents=True)
    for name in (*CONFIG_FILES, *TOKENIZER_FILES):  # not the card, nor a profile: they describe other weights
        shutil.copyfile(model / name, out / name)
    mean = {
        name: (share * others[name].float() + (1 - share) * tensor.float()).to(tensor.dtype)
        for name, tensor in own.items()
    }
    facts = fingerprint(model)
    del facts["xxh3_128"]
    averaged = f"{share:.0%} of the model with xxh3-128 {fingerprint(other)['xxh3_128']}"
    write_weights(out, mean, {**facts, "averaged": averaged})


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
    try:
        average(options.model, options.other, options.share, options.out)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
