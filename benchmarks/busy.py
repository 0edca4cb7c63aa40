"""Compares how OpenMP's threads wait for each other, on a machine where something else runs, too.

python benchmarks/busy.py [--busy N] [--repeat N] [--random-weights llama:6x256]

Each way to wait answers one prompt by `cacheblend bench ttft` in a process of its own, while ``--busy`` other processes compute
without a pause; 0 shows a quiet machine. A thread that has nothing to do spins for GOMP_SPINCOUNT rounds before it sleeps: on a
core that another process wants, all others wait for one that spins. Seconds are wall time of the blend and of full recompute,
medians of ``--repeat`` rounds; CPU is what the whole command took, start included: spinning is paid there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

# libgomp itself takes 300,000 rounds where nothing is said.
WAYS = {
    "300,000 rounds": {"GOMP_SPINCOUNT": "300000"},
    "10,000 rounds": {"GOMP_SPINCOUNT": "10000"},
    "1,000 rounds": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Measure each way once, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--random-weights", default="llama:6x256")
    options = parser.parse_args()
    command = [sys.executable, "-m", "cacheblend_rag", "bench", "ttft", "--random-weights", options.random_weights]
    command += ["--chunk-tokens", "256", "--repeat", str(options.repeat), "--ratio", "0.15", "--json"]
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    for name, way in WAYS.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with beside(options.busy):
            found = subprocess.run(command, env={**os.environ, **threads, **way}, stdout=subprocess.PIPE, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        methods = json.loads(found.stdout)["methods"]
        full, blend = (median(methods[method]["ttft_s"]) for method in ("full", "blend"))
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{name:16} full {full:6.2f} s   blend {blend:6.2f} s   {full / blend:4.1f}x   CPU {cpu:6.1f} s", flush=True
        )


if __name__ == "__main__":
    main()
