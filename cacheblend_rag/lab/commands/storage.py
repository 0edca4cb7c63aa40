"""Runs `cacheblend store calibrate` and `store plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_engine, open_vllm, store_directory, with_model
from cacheblend_rag.console.groups import ModelOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, seconds, size, status, table

if TYPE_CHECKING:
    from cacheblend_rag.lab.doctor.prices import PricePlan
    from cacheblend_rag.lab.doctor.storage import StoragePlan


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
    """Measure what loading from the store and computing cost here, for --ratio auto; say which tier is fast enough.

    Engines compute at different speed: measure each that you use. Until it is measured, vLLM begins with what transformers takes.
    """
    from cacheblend_rag.blending.profile import save_costs
    from cacheblend_rag.lab.doctor.costs import measure_costs
    from cacheblend_rag.lab.doctor.storage import plan_storage
    from cacheblend_rag.lab.doctor.workbench import Workbench

    place = store_directory(directory)
    model = with_model(model, index_directory(directory, "default"))
    # The KV that is measured with goes when the engine is closed; only the store's tiers are looked at.
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


@takes_groups
def plan(
    *,
    model: ModelOptions,
    engine: options.Engine = "transformers",
    prices: Annotated[
        Path, typer.Option(help="TOML: a table for each tier with its prices; see the guide on stores.", dir_okay=False)
    ],
    chunks: Annotated[float, typer.Option(min=1, help="Chunks to keep: 1e6.")],
    per_month: Annotated[float, typer.Option(min=0, help="Prompts a month.")] = 0,
    ratio: Annotated[
        float | None, typer.Option(min=0, max=1, help="Tokens recomputed (default: the model profile's).")
    ] = None,
    prompt_chunks: Annotated[int, typer.Option(min=1, help="Chunks of a typical prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a typical chunk.")] = 512,
    as_json: options.AsJSON = False,
) -> None:
    """Say where to keep a corpus's KV: what each tier costs a month, and what it does to the first token.

    How fast tiers and model are is what `store calibrate` has measured; the file of prices may describe other devices.
    """
    from cacheblend_rag.blending.profile import load_costs
    from cacheblend_rag.errors import InputError, ModelError
    from cacheblend_rag.lab.doctor.costs import token_bytes
    from cacheblend_rag.lab.doctor.prices import Corpus, plan_prices, read_prices
    from cacheblend_rag.lab.doctor.storage import typical_load
    from cacheblend_rag.lab.doctor.workbench import Workbench

    paid = read_prices(prices)
    with open_engine(with_model(model)) as opened:  # whichever engine: of the model only the size of its KV is wanted
        costs = load_costs(opened.fingerprint.digest, str(opened.device), engine)
        if costs is None:
            raise InputError(
                f"Nothing was measured of this model on {opened.device}. Run `cacheblend store calibrate`."
            )
        bench = Workbench.of(opened)
        load = typical_load(bench, prompt_chunks, chunk_tokens, ratio)
        if load is None:
            raise ModelError("This model is not blended, so stored KV serves no purpose. `cacheblend doctor` says why.")
        corpus = Corpus(chunks, lambda codec: token_bytes(bench, codec) * chunk_tokens, per_month)
        found = plan_prices(load, costs, paid, corpus)
    if as_json:
        print_json({**asdict(found), "ratio": load.least})
        return
    _print(
        found,
        f"{chunks:,.0f} chunks of {chunk_tokens} tokens, {per_month:,.0f} prompts a month of {prompt_chunks} chunks",
    )
    echo(
        f"\nThe cheapest that delays nothing at {load.least:.0%} recomputed: {found.cheapest}."
        if found.cheapest is not None
        else f"\nFrom every tier loading takes longer than recomputing {load.least:.0%}, and delays the first token."
    )


def _print(plan: PricePlan, what: str) -> None:
    echo(f"{what}:\n")
    counted = plan.prefill_month is not None
    rows = [
        [
            "tier",
            "KV",
            "keeping",
            "reading",
            *["computing", "a month"] * counted,
            "loading",
            "recomputing",
            "first token",
        ]
    ]
    for tier in plan.tiers:
        spent = [tier.keeping, tier.reading, *([tier.computing or 0.0, tier.month] if counted else [])]
        times = [seconds(tier.load_s), seconds(tier.recompute_s), seconds(tier.seconds)]
        rows.append([tier.tier, size(tier.nbytes), *(f"{price:,.2f}" for price in spent), *times])
    if plan.prefill_month is not None:
        month = f"{plan.prefill_month:,.2f}"
        rows.append(["no KV kept", "-", "-", "-", month, month, "-", "-", seconds(plan.prefill_s)])
    else:
        rows.append(["no KV kept", "-", "-", "-", "-", "-", seconds(plan.prefill_s)])
    echo(table(rows))
