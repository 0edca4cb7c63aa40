"""Runs `cacheblend bench controller`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.output import echo, print_json, status, table


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
