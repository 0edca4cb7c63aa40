"""Runs every measurement that needs a GPU, one after another, each in a separate process: `make bench-gpu`.

python lab/benchmarks/gpu.py [--engine transformers|vllm|all] [--only NAME ...] [--within SECONDS] [--out DIR] [--again] [--list]

Results are written to lab/benchmarks/results/ as MEASUREMENT-GPU.json, with machine, versions and command. Measurements
with a result are skipped, so that the next call continues a run that ``--within`` cut short (for a GPU lent for
minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# With this path, the commands run from a clone without installation.
_CLONE = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")))}
MODEL = ("--random-weights", "llama-3.1-8b", "--dtype", "bfloat16")
PROMPT = ("--chunk-tokens", "512", "--question-tokens", "32")


@dataclass(frozen=True)
class Measurement:
    """Describes one command whose standard output is JSON.

    Attributes:
        arguments: Python's arguments: ``-m cacheblend_lab ...`` or a file of the benchmarks folder.
        needs_s: Timeout in seconds.
    """

    arguments: tuple[str, ...]
    needs_s: int = 300


def _bench(what: str, engine: str, *more: str, needs_s: int = 300) -> Measurement:
    return Measurement(("-m", "cacheblend_lab", "bench", what, "--engine", engine, *MODEL, *more, "--json"), needs_s)


def _ttft(engine: str, policy: str, ratio: str, chunks: int = 6, *more: str) -> Measurement:
    blend = ("--policy", policy, "--ratio", ratio, "--repeat", "5")
    return _bench("ttft", engine, "--chunks", str(chunks), *PROMPT, *blend, *more)


def measurements(engine: str) -> dict[str, Measurement]:
    """Return the measurements of ``engine`` by name, the most informative first."""
    found = {
        f"ttft-{engine}-8b-{policy}-{ratio}": _ttft(engine, policy, f"0.{ratio}")
        for policy, ratio in (("static", "05"), ("static", "15"), ("hkvd", "15"), ("static-query", "15"))
    }
    found[f"ttft-{engine}-8b-static-05-24-chunks"] = _ttft(engine, "static", "0.05", 24)
    found[f"ttft-{engine}-8b-static-05-disk"] = _ttft(engine, "static", "0.05", 6, "--kv", "disk")
    found[f"ttft-{engine}-8b-static-05-int8"] = _ttft(engine, "static", "0.05", 6, "--kv", "int8")
    found[f"index-{engine}-8b"] = _bench("index", engine, "--chunks", "12", "--repeat", "3")
    if engine == "transformers":
        found["profile-transformers-8b"] = Measurement(
            ("lab/benchmarks/profile_blend.py", *MODEL, "--policy", "static", "--ratio", "0.15", "--json")
        )
    else:
        found["streams-vllm-8b"] = _bench("streams", engine, "--ratio", "0.15", "--streams", "8")
        found["throughput-vllm-8b"] = _bench("throughput", engine, "--policy", "static", "--ratio", "0.05", needs_s=540)
    return found


def gpu_name() -> str:
    """Return the GPU's name for file names; raise SystemExit without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device; on a CPU the commands of --list run with smaller models.")
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def measure(one: Measurement, file: Path) -> str | None:
    """Run ``one`` and write its JSON to ``file``; return the reason for a failure, or None."""
    command = [sys.executable, *one.arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_CLONE, stdout=subprocess.PIPE, timeout=one.needs_s, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return f"not done after {one.needs_s} s"
    if done.returncode:
        return f"exit status {done.returncode}"
    try:
        result = json.loads(done.stdout)
    except json.JSONDecodeError:
        return "no JSON"
    file.write_text(json.dumps({"command": " ".join(["python", *one.arguments]), **result}, indent=2) + "\n", "utf-8")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["transformers", "vllm", "all"], default="all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these alone")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="begin nothing later")
    parser.add_argument("--out", type=Path, default=ROOT / "lab" / "benchmarks" / "results")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()
    engines = ["transformers", "vllm"] if options.engine == "all" else [options.engine]
    wanted = {name: one for engine in engines for name, one in measurements(engine).items()}
    if options.only:
        if unknown := set(options.only) - set(wanted):
            parser.error(f"no such measurement: {', '.join(sorted(unknown))}; --list shows them")
        wanted = {name: wanted[name] for name in options.only}
    if options.list:
        for name, one in wanted.items():
            print(f"{name:40} python {' '.join(one.arguments)}")
        return
    gpu, begin, failed = gpu_name(), time.monotonic(), {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, one in wanted.items():
        file = options.out / f"{name}-{gpu}.json"
        if file.exists() and not options.again:
            continue
        if time.monotonic() - begin + one.needs_s > options.within:
            failed[name] = "no time left; run again to go on"
            continue
        print(name, flush=True)
        if (why := measure(one, file)) is not None:
            failed[name] = why
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
