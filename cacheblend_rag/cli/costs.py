"""Runs `cacheblend store calibrate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_engine, open_vllm, store_directory, with_model
from cacheblend_rag.console.groups import ModelOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, seconds, status, table

if TYPE_CHECKING:
    from cacheblend_rag.calibrate.storage import StoragePlan


@takes_groups
def calibrate(
    *,
    directory: options.Store = None,
    model: ModelOptions,
    engine: options.Engine = "transformers",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a typical prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a typical chunk.")] = 512,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the cost of loading from the store and of computing, for --ratio auto; show which tiers are fast enough.

    Engines compute at different speeds: measure each engine that you use. Before that, vLLM uses the costs of transformers.
    """
    from cacheblend_rag.blending.profile import save_costs
    from cacheblend_rag.calibrate.costs import measure_costs
    from cacheblend_rag.calibrate.storage import plan_storage
    from cacheblend_rag.calibrate.workbench import Workbench

    place = store_directory(directory)
    model = with_model(model, index_directory(directory, "default"))
    # The KV used for measuring is deleted when the engine is closed; of the store, only the tiers are measured.
    opened = open_vllm(model, None, None, None, None) if engine == "vllm" else open_engine(model)
    with opened, status("Measuring") as say:
        bench = Workbench.of(opened)
        costs = measure_costs(bench, place, say)
        file = save_costs(costs, opened.fingerprint.digest, str(opened.device), engine)
        plan = plan_storage(bench, costs, chunks, chunk_tokens)
    if as_json:
        print_json({**asdict(costs), "file": str(file), "plan": plan and asdict(plan)})
        return
    rows = [["tier", "rate", "latency"]]
    rows += [[name, f"{t.bytes_per_s / 1e9:.2f} GB/s", seconds(t.latency_s)] for name, t in costs.tiers.items()]
    echo(table(rows))
    if plan is not None:
        _print_tiers(plan, chunks, chunk_tokens)
    echo(f"\nWritten to {file}")


def _print_tiers(plan: StoragePlan, chunks: int, chunk_tokens: int) -> None:
    echo(
        f"\nA prompt of {chunks} chunks of {chunk_tokens} tokens takes {seconds(plan.prefill_s)} without blending. "
        f"With its KV in one tier, and at least {plan.least:.0%} recomputed:\n"
    )
    rows = [["tier", "loading", "first token", "chunks loaded", "ratio at no cost"]]
    for tier in plan.tiers:
        ratio = f"{tier.ratio:.0%}" if tier.used else "-"
        rows.append([tier.tier, seconds(tier.load_s), seconds(tier.seconds), f"{tier.used} of {chunks}", ratio])
    echo(table(rows))
    if plan.cheapest is None:
        echo("\nFrom every tier loading takes longer than recomputing, and delays the first token.")
    else:
        echo(f"\nThe cheapest tier that delays nothing: {plan.cheapest}.")
