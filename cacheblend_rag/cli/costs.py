"""Runs `cacheblend store calibrate`."""

from __future__ import annotations

from dataclasses import asdict

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_engine, open_vllm, store_directory, with_model
from cacheblend_rag.console.groups import ModelOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, seconds, status, table


@takes_groups
def calibrate(
    *,
    directory: options.Store = None,
    model: ModelOptions,
    engine: options.Engine = "transformers",
    as_json: options.AsJSON = False,
) -> None:
    """Measure the cost of loading from the store and of computing, for --ratio auto; show which tiers are fast enough.

    Engines compute at different speeds: measure each engine that you use. Before that, vLLM uses the costs of transformers.
    """
    from cacheblend_rag.blending.profile import save_costs
    from cacheblend_rag.calibrate.costs import estimate, measure_costs, typical_load

    place = store_directory(directory)
    model = with_model(model, index_directory(directory, "default"))
    # The KV used for measuring is deleted when the engine is closed; of the store, only the tiers are measured.
    opened = open_vllm(model, None, None, None, None) if engine == "vllm" else open_engine(model)
    with opened, status("Measuring") as say:
        costs = measure_costs(opened, place, say)
        file = save_costs(costs, opened.fingerprint.digest, str(opened.device), engine)
        load = typical_load(opened)
    expected = {} if load is None else estimate(load, costs)
    if as_json:
        estimates = {tier: asdict(each) for tier, each in expected.items()}
        print_json({**asdict(costs), "file": str(file), "estimates": estimates})
        return
    rows = [["tier", "rate", "latency", "loading", "first token"]]
    for name, tier in costs.tiers.items():
        times = [seconds(expected[name].load_s), seconds(expected[name].blend_s)] if expected else ["-", "-"]
        rows.append([name, f"{tier.bytes_per_s / 1e9:.2f} GB/s", seconds(tier.latency_s), *times])
    echo(table(rows))
    if load is not None:
        echo(
            f"\nLoading and first token: of a prompt of 6 chunks of 512 tokens, of whose stored tokens {load.least:.0%} are "
            f"recomputed; {seconds(expected['ram'].full_s)} without blending."
        )
    echo(f"\nWritten to {file}")
