"""`cacheblend bench ratio`, `chunks`, `batch`, `devices`: TTFT of the transformers engine against one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.bench import METHOD_NAMES, BenchOptions, Repeat, bench
from cacheblend_rag.cli.groups import BlendOptions, takes_groups
from cacheblend_rag.cli.output import print_json, seconds, size, status, table
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.bench.setup import Workbench
    from cacheblend_rag.bench.sweeps import Point

Sweep = Callable[["Workbench", Callable[[str], None]], "list[Point]"]


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise InputError(f"{option} {text!r} is not a list of numbers above 0; separate them by commas.")
    return found


@bench.command()
@takes_groups
def chunks(
    *,
    model: BenchOptions,
    counts: Annotated[str, typer.Option(help="Numbers of chunks of 512 tokens.")] = "2,4,6,8",
    lengths: Annotated[str, typer.Option(help="Lengths of 6 chunks, in tokens; empty for none.")] = "128,256,512,768",
    repeat: Repeat = 3,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the TTFT against the number and the length of chunks."""
    wanted = _numbers(counts, "--counts", int)
    sizes = _numbers(lengths, "--lengths", int) if lengths else []

    def sweep(place: Workbench, say: Callable[[str], None]) -> list[Point]:
        from cacheblend_rag.bench.sweeps import sweep_chunks, sweep_lengths

        return [*sweep_chunks(place, wanted, repeat, say), *(sweep_lengths(place, sizes, repeat, say) if sizes else [])]

    _run(model, sweep, as_json, {"chunks": "chunks of 512 tokens", "chunk_tokens": "tokens in each of 6 chunks"})


@bench.command()
@takes_groups
def batch(
    *,
    model: BenchOptions,
    sizes: Annotated[str, typer.Option(help="Requests that arrive together.")] = "1,2,4",
    repeat: Repeat = 3,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the last TTFT of requests that arrive together (this engine computes one at a time)."""
    wanted = _numbers(sizes, "--sizes", int)

    def sweep(place: Workbench, say: Callable[[str], None]) -> list[Point]:
        from cacheblend_rag.bench.sweeps import sweep_batch

        return sweep_batch(place, wanted, repeat, say)

    _run(model, sweep, as_json, {"batch": "requests at once"})


@bench.command()
@takes_groups
def ratio(
    *,
    model: BenchOptions,
    ratios: Annotated[str, typer.Option(help="Recompute ratios.")] = "0.05,0.1,0.15,0.2,0.3,0.5",
    policy: options.Policy = BlendOptions.policy,
    repeat: Repeat = 3,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the TTFT against the recompute ratio, between full KV reuse (0) and full recompute (1)."""
    wanted = _numbers(ratios, "--ratios", float)

    def sweep(place: Workbench, say: Callable[[str], None]) -> list[Point]:
        from cacheblend_rag.bench.sweeps import sweep_ratio

        return sweep_ratio(place, wanted, policy, repeat, say)

    _run(model, sweep, as_json, {"ratio": "recompute ratio"})


@bench.command()
@takes_groups
def devices(
    *,
    model: BenchOptions,
    bandwidths: Annotated[str, typer.Option(help="GB per second.")] = "0.05,0.1,0.2,0.5,1,2,4.8",
    repeat: Repeat = 3,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the TTFT against the storage device's bandwidth, simulated by a throttled RAM store."""
    wanted = [rate * 1e9 for rate in _numbers(bandwidths, "--bandwidths", float)]

    def sweep(place: Workbench, say: Callable[[str], None]) -> list[Point]:
        from cacheblend_rag.bench.sweeps import sweep_devices
        from cacheblend_rag.bench.throttled import ThrottledStore

        place.engine.store = ThrottledStore(wanted[0])
        return sweep_devices(place, wanted, repeat, say)

    _run(model, sweep, as_json, {"bytes_per_s": "bandwidth"})


def _run(model: BenchOptions, sweep: Sweep, as_json: bool, axes: dict[str, str]) -> None:
    from cacheblend_rag.bench import Workbench
    from cacheblend_rag.bench.measure import machine

    with status("Measuring") as say, Workbench.open(model.choice()) as opened:
        points = sweep(opened, say)
        about = {"engine": "transformers", "model": opened.label, "machine": machine(opened.device)}
    if as_json:
        print_json({**about, "points": points})
        return
    typer.echo(f"{about['model']}; medians, TTFT\n")
    for key, label in axes.items():
        mine = [point for point in points if key in point]
        if mine:
            typer.echo(table(_rows(mine, key, label)) + "\n")


def _rows(points: Sequence[Point], key: str, label: str) -> list[list[str]]:
    names = [name for name in METHOD_NAMES if any(point["method"] == name for point in points)]
    rows = [[label, *(METHOD_NAMES[name] for name in names)]]
    for value in sorted({point[key] for point in points}, key=float):
        found = {point["method"]: point["ttft_s"] for point in points if point[key] == value}
        cells = ["-" if found.get(name) is None else seconds(found[name]) for name in names]
        rows.append([_named(key, float(value)), *cells])
    return rows


def _named(key: str, value: float) -> str:
    if key == "bytes_per_s":
        return f"{size(value)}/s"
    return f"{value:.3g}" if key == "ratio" else f"{value:.0f}"
