"""Compares ways in which OpenMP's threads wait for each other, on a machine where other processes run, too.

python lab/benchmarks/busy.py [--busy N] [--repeat N] [--random-weights llama:6x256]
python lab/benchmarks/busy.py --commands [--busy N]

For each way to wait, `cacheblend bench ttft` answers one prompt in a separate process, while ``--busy`` other processes
compute without a pause; 0 shows a quiet machine. An idle thread spins for GOMP_SPINCOUNT rounds before it sleeps; on a
core that another process needs, a spinning thread delays all other threads. Seconds are wall time of the blend and of
full recompute, medians of ``--repeat`` rounds; CPU is the CPU time of the whole command with its start, which includes
spinning.

``--commands`` runs whole commands as users do, on the machine as it is and then beside the busy processes, and compares
the commands' wall times and the speed-ups of the demo's blend.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

# libgomp's default is 300,000 rounds.
WAYS = {
    "300,000 rounds": {"GOMP_SPINCOUNT": "300000"},
    "10,000 rounds": {"GOMP_SPINCOUNT": "10000"},
    "1,000 rounds": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
# The commands run in this order; {} is a new directory.
COMMANDS = (
    "demo --json --store {}/demo",
    "index docs/concepts --store {}/own",
    "ask 'How is a blend computed?' --store {}/own",
    "doctor --model smollm2",
    "tune-retriever --demo --store {}/tuning --output {}/tuned",
)


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Run ``count`` busy processes inside the context."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def compare_commands(count: int) -> None:
    """Print the wall time of each command, alone and beside ``count`` busy processes."""
    took: list[list[float]] = [[], []]
    gains: list[float] = []
    for run, others in enumerate((0, count)):
        with tempfile.TemporaryDirectory() as place, beside(others):
            for command in COMMANDS:
                given = shlex.split(command.replace("{}", place))
                begin = time.perf_counter()
                found = subprocess.run(
                    [sys.executable, "-m", "cacheblend_rag", *given],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    check=True,
                )
                took[run].append(time.perf_counter() - begin)
                # Print each command's time at once: all commands take more than a quarter of an hour.
                print(f"{given[0]:16} beside {others} busy {took[run][-1]:6.1f} s", flush=True)
                if given[0] == "demo":
                    totals = json.loads(found.stdout)["totals"]
                    gains.append(totals["full recompute"]["ttft_s"] / totals["blend"]["ttft_s"])
    for command, quiet, busy in zip(COMMANDS, *took, strict=True):
        print(f"{command.split()[0]:16} {quiet:6.1f} s   beside {count} busy {busy:6.1f} s   {busy / quiet:4.1f}x")
    print(f"the demo's blend {gains[0]:.1f}x, beside {count} busy {gains[1]:.1f}x: {gains[1] / gains[0]:.0%} of it")


def main() -> None:
    """Measure each way to wait once, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--random-weights", default="llama:6x256")
    parser.add_argument("--commands", action="store_true", help="whole commands instead")
    options = parser.parse_args()
    if options.commands:
        compare_commands(options.busy)
        return
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
