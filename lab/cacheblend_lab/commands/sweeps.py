"""Runs `cacheblend bench ratio`, `chunks`, `batch` and `devices`, which vary one parameter each, and `controller`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_lab.commands.bench_options import METHOD_NAMES, BenchOptions, Repeat
from cacheblend_rag.console import options
from cacheblend_rag.console.groups import BlendOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, seconds, size, status, table
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_lab.bench.sweeps import Point
    from cacheblend_lab.workbench import Workbench

Say = Callable[[str], None]
Sweep = Callable[["Workbench", Say], "list[Point]"]


@dataclass(frozen=True)
class SweepOptions:
    """Groups the options that every sweep takes."""

    model: BenchOptions = field(default_factory=BenchOptions)
    repeat: Repeat = 3
    as_json: options.AsJSON = False


def parse_numbers(text: str, option: str, kind: type[int] | type[float], least: float | None = None) -> list[Any]:
    """Return the numbers of a comma-separated list.

    Raises:
        InputError: The text is not such a list, or a number is below ``least`` (without ``least``: not above 0).
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or (min(found) <= 0 if least is None else min(found) < least):
        wanted = "above 0" if least is None else f"from {least:g} on"
        raise InputError(f"{option} {text!r} is not a list of numbers {wanted}; separate them by commas.")
    return found


@takes_groups
def chunks(
    *,
    counts: Annotated[str, typer.Option(help="Numbers of chunks of 512 tokens.")] = "2,4,6,8",
    lengths: Annotated[str, typer.Option(help="Lengths of 6 chunks, in tokens; empty for none.")] = "128,256,512,768",
    how: SweepOptions,
) -> None:
    """Measure the TTFT against the number and the length of chunks."""
    wanted = parse_numbers(counts, "--counts", int)
    sizes = parse_numbers(lengths, "--lengths", int) if lengths else []
    from cacheblend_lab.bench.sweeps import sweep_sizes

    def sweep(place: Workbench, say: Say) -> list[Point]:
        by_count = sweep_sizes(place, "chunks", wanted, how.repeat, say)
        return by_count + sweep_sizes(place, "chunk_tokens", sizes, how.repeat, say)

    _run(how, sweep, {"chunks": "chunks of 512 tokens", "chunk_tokens": "tokens in each of 6 chunks"})


@takes_groups
def batch(
    *,
    sizes: Annotated[str, typer.Option(help="Requests that arrive together.")] = "1,2,4",
    how: SweepOptions,
) -> None:
    """Measure the last TTFT of requests that arrive together (the engine computes one request at a time)."""
    wanted = parse_numbers(sizes, "--sizes", int)
    from cacheblend_lab.bench.sweeps import sweep_sizes

    _run(how, lambda place, say: sweep_sizes(place, "batch", wanted, how.repeat, say), {"batch": "requests at once"})


@takes_groups
def ratio(
    *,
    ratios: Annotated[str, typer.Option(help="Recompute ratios.")] = "0.05,0.1,0.15,0.2,0.3,0.5",
    how: SweepOptions,
    policy: options.Policy = BlendOptions.policy,
) -> None:
    """Measure the TTFT against the recompute ratio, between full KV reuse (0) and full recompute (1)."""
    wanted = parse_numbers(ratios, "--ratios", float)
    from cacheblend_lab.bench.sweeps import sweep_ratio

    _run(how, lambda place, say: sweep_ratio(place, wanted, policy, how.repeat, say), {"ratio": "recompute ratio"})


@takes_groups
def devices(
    *,
    bandwidths: Annotated[str, typer.Option(help="GB per second.")] = "0.05,0.1,0.2,0.5,1,2,4.8",
    how: SweepOptions,
    ratio: options.BlendRatio = BlendOptions.ratio,
    policy: options.Policy = BlendOptions.policy,
) -> None:
    """Measure the TTFT against the storage device's bandwidth, simulated by a throttled RAM store.

    "of the bound" is the blend's TTFT divided by a lower bound: the longer of loading its KV and recomputing its
    tokens.
    """
    wanted = [rate * 1e9 for rate in parse_numbers(bandwidths, "--bandwidths", float)]
    settings = BlendOptions(ratio, policy).settings()
    from cacheblend_lab.bench.sweeps import ThrottledStore, sweep_devices

    def sweep(place: Workbench, say: Say) -> list[Point]:
        place.engine.store = ThrottledStore(wanted[0])
        return sweep_devices(place, wanted, how.repeat, say, settings)

    _run(how, sweep, {"bytes_per_s": "bandwidth"})


def _run(how: SweepOptions, sweep: Sweep, axes: dict[str, str]) -> None:
    from cacheblend_lab.bench import open_workbench
    from cacheblend_rag.calibrate.measure import describe_machine

    with status("Measuring") as say, open_workbench(how.model.choice()) as opened:
        points = sweep(opened, say)
        about = {"engine": "transformers", "model": opened.label, "machine": describe_machine(opened.device)}
    if how.as_json:
        print_json({**about, "points": points})
        return
    echo(f"{about['model']}; medians, TTFT\n")
    for key, label in axes.items():
        mine = [point for point in points if key in point]
        if mine:
            echo(table(_rows(mine, key, label)) + "\n")


def _rows(points: Sequence[Point], key: str, label: str) -> list[list[str]]:
    labels = METHOD_NAMES | {"controller": "controller", "ready": "blend, KV at hand"}
    names = [name for name in labels if any(point["method"] == name for point in points)]
    bounds = {point[key]: point["ttft_s"] / point["bound_s"] for point in points if "bound_s" in point}
    rows = [[label, *(labels[name] for name in names), *(["of the bound"] if bounds else [])]]
    for value in sorted({point[key] for point in points}, key=float):
        found = {point["method"]: point["ttft_s"] for point in points if point[key] == value}
        cells = ["-" if found.get(name) is None else seconds(found[name]) for name in names]
        rows.append([_named(key, float(value)), *cells, *([f"{bounds[value]:.2f}"] if bounds else [])])
    return rows


def _named(key: str, value: float) -> str:
    if key == "bytes_per_s":
        return f"{size(value)}/s"
    return f"{value:.3g}" if key == "ratio" else f"{value:.0f}"


def controller(
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Lowest recompute ratio.")] = 0.15,
    dense: Annotated[int, typer.Option(min=0, help="Layers of a dense pass; 0 for a policy without one.")] = 0,
    flops: Annotated[float, typer.Option(help="FLOP/s that the simulated device reaches.")] = 4e14,
    as_json: options.AsJSON = False,
) -> None:
    """Compare the loading controller's choices with the best possible, on simulated devices, prompts and models."""
    from cacheblend_lab.bench import ControllerSettings, bench_controller

    with status("Simulating"):
        found = bench_controller(ControllerSettings(ratio, dense=dense, flops=flops))
    if as_json:
        print_json(found)
        return
    rows = [["model", "prefill", "some chunks", "all chunks", "worst regret"]]
    for model in dict.fromkeys(point["model"] for point in found["points"]):
        mine = [point for point in found["points"] if point["model"] == model]
        arms = Counter("none" if not p["used"] else "all" if p["used"] == p["chunks"] else "some" for p in mine)
        worst = max(point["regret"] for point in mine)
        rows.append([model, *(f"{arms[arm]} points" for arm in ("none", "some", "all")), f"{worst:.3f}"])
    echo(table(rows))
    worst = found["worst"]
    echo(
        f"\nAt worst the first token comes {found['worst_regret']:.3f} times as late as by the best choice: {worst['model']}, "
        f"{worst['chunks']} chunks, {worst['bytes_per_s'] / 1e9:.2f} GB/s, {worst['placed']}."
    )
