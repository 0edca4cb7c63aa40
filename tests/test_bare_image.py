"""Tests that GPU benchmarks run from a clone, on an image with little more than torch, transformers and their needs."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
# The image holds these packages and their requirements.
IMAGE = ("torch", "transformers", "triton", "tokenizers", "numpy", "safetensors", "typer", "rich", "xxhash", "filelock")


def needed(names: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """Yield installed packages and all that they require."""
    seen, left = set(), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        yield found
        wanted = map(Requirement, found.requires or ())
        left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> dict[str, str]:
    """Return the environment of a Python that finds only this clone and the image's packages."""
    packages = tmp_path_factory.mktemp("packages")
    for each in needed(IMAGE):
        for name in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(each.locate_file(name)))
    home = tmp_path_factory.mktemp("home")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (packages, ROOT, ROOT / "lab"))), "HOME": str(home)}


def run(bare: dict[str, str], *arguments: str) -> str:
    """Run Python without the packages of its environment; return its output."""
    done = subprocess.run([sys.executable, "-S", *arguments], env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_bench_runs_and_measuring_and_training_modules_import_on_a_bare_image(bare):
    small = ("--chunks", "2", "--chunk-tokens", "24", "--question-tokens", "8", "--repeat", "1")
    model = ("--random-weights", "llama:2x256", "--dtype", "bfloat16", "--kv", "disk")
    folders = [f"cacheblend_rag/{name}" for name in ("blending", "prompts", "engines/transformers", "engines/kernels")]
    folders += ["cacheblend_rag/calibrate", "lab/cacheblend_lab/bench", "lab/cacheblend_lab/learn"]
    files = [file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).glob("*.py")]
    files.remove(Path("lab/cacheblend_lab/bench/vllm_weights.py"))  # vLLM's workers import it
    names = [".".join(file.with_suffix("").parts).removeprefix("lab.").removesuffix(".__init__") for file in files]
    names += ["cacheblend_rag.store.opening", "cacheblend_rag.store.tiered"]
    # Modules that ask questions import search, embedding and file readers only on use.
    names += ["cacheblend_rag.cli.ask", "cacheblend_rag.rag.pipeline"]
    program = "import sys, importlib\nfrom cacheblend_lab.commands import COMMANDS\nfrom cacheblend_rag import cli\n"
    program += "cli.COMMANDS.update(COMMANDS)\ncli.app(sys.argv[1:], standalone_mode=False)\n"
    program += f"for name in {names}: importlib.import_module(name)"
    said = json.loads(run(bare, "-c", program, "bench", "ttft", *model, *small, "--json"))
    assert said["methods"]["blend"]["reused_tokens"], said
