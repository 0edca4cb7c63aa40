"""Runs `cacheblend bench ttft`, `index`, `score`, `throughput` and `streams`, on either engine."""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import typer

from cacheblend_lab.commands import sweeps
from cacheblend_lab.commands.bench_options import (
    KV,
    METHOD_NAMES,
    BenchOptions,
    Chunks,
    ChunkTokens,
    Directory,
    QuestionTokens,
    RandomSeed,
    Repeat,
)
from cacheblend_lab.commands.shapes import shapes
from cacheblend_rag.console import options
from cacheblend_rag.console.groups import BlendOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, seconds, size, status, table

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure time to first token, requests per second, running streams, or the rate of indexing.",
)


@bench.command()
@takes_groups
def ttft(
    *,
    engine: options.Engine = "transformers",
    model: BenchOptions,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    blend: BlendOptions,
    repeat: Repeat = 3,
    kv: KV = "ram",
    cold: Annotated[bool, typer.Option("--cold", help="Empty the page cache of the KV before every method.")] = False,
    directory: Directory = None,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the time to first token of full recompute, prefix caching, full KV reuse and blend, interleaved."""
    from cacheblend_lab.bench import TTFTSettings, bench_ttft, open_workbench

    how = blend.settings()
    if how.ratio == "auto":
        from cacheblend_rag.errors import InputError

        raise InputError("--ratio auto depends on the text, and a benchmark's has no meaning; give a number.")
    settings = TTFTSettings(
        chunks, chunk_tokens, question_tokens, how.ratio, blend.policy, how.check_layers, repeat, cold, seed
    )
    context = chunks * chunk_tokens + question_tokens + 256
    with status("Measuring") as say, open_workbench(model.choice(engine), kv, directory, context) as place:
        result = bench_ttft(place, settings, say)
    print_json(result) if as_json else _print_ttft(result)


@bench.command()
@takes_groups
def index(
    *,
    engine: options.Engine = "transformers",
    model: BenchOptions,
    chunks: Chunks = 16,
    chunk_tokens: ChunkTokens = 512,
    repeat: Repeat = 3,
    kv: KV = "ram",
    directory: Directory = None,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the tokens per second of indexing chunk KV, with and without ranking, against a plain prefill."""
    from cacheblend_lab.bench import IndexSettings, bench_index, open_workbench

    with status("Measuring") as say, open_workbench(model.choice(engine), kv, directory) as place:
        result = bench_index(place, IndexSettings(chunks, chunk_tokens, repeat, seed), say)
    if as_json:
        print_json(result)
        return
    rates = {name: method["tokens_per_s"] for name, method in result["methods"].items()}
    echo(_heading(result))
    echo(f"plain batched prefill   {rates['plain']:10,.0f} tokens/s")
    echo(f"index, KV to {kv:10} {rates['index']:10,.0f} tokens/s   {result['rate_index_vs_plain']:.2f} of plain")
    echo(
        f"index, ranked too       {rates['ranked']:10,.0f} tokens/s   {result['rank_cost']:.2f} times as long as without"
    )


@bench.command()
@takes_groups
def score(
    *,
    model: BenchOptions,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks, each in a prompt of its own.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the answer that is scored.")] = 8,
    repeat: Repeat = 3,
    kv: KV = "ram",
    directory: Directory = None,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the time to score an answer over a chunk's stored KV, against prefilling chunk, question and answer."""
    from cacheblend_lab.bench import ScoreSettings, bench_score, open_workbench

    settings = ScoreSettings(chunks, chunk_tokens, question_tokens, answer_tokens, repeat, seed)
    with status("Measuring") as say, open_workbench(model.choice(), kv, directory) as place:
        result = bench_score(place, settings, say)
    if as_json:
        print_json(result)
        return
    times = {name: seconds(median(method["seconds_per_pair"])) for name, method in result["methods"].items()}
    echo(_heading(result))
    echo(f"prefill of chunk, question, answer   {times['prefill']} a pair")
    echo(f"score over the chunk's stored KV     {times['cached']} a pair   {result['speedup']:.1f}x")
    echo(f"largest difference of a token's log-probability  {result['largest_difference']:.1e}")


@bench.command()
@takes_groups
def throughput(
    *,
    engine: options.Engine = "transformers",
    model: BenchOptions,
    corpus: Annotated[int, typer.Option(min=1, help="Chunks in the corpus.")] = 24,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in a prompt, in random order.")] = 6,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens in every answer.")] = 8,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests at each rate at least; more where they come fast.")
    ] = 40,
    ratio: options.Ratio = None,
    policy: options.Policy = BlendOptions.policy,
    target_ttft: Annotated[
        float | None, typer.Option(help="Median TTFT to hold, in seconds (default: twice an idle full prefill's).")
    ] = None,
    skew: Annotated[
        float, typer.Option(min=0, help="How much more often some chunks are asked for: 0 all alike, 1 Zipf's law.")
    ] = 0.0,
    methods: Annotated[
        str | None,
        typer.Option(help="Measure these only, such as full,blend: all of them take long on a slow machine."),
    ] = None,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the requests per second that full recompute, prefix caching and blend serve at equal median TTFT.

    Two more methods reorder each prompt's chunks so that the engine's prefix cache hits, with and without a blend.
    """
    from cacheblend_lab.bench import ThroughputSettings, bench_throughput, open_workbench

    load = (corpus, chunks, chunk_tokens, question_tokens, answer_tokens, requests)
    named = None if methods is None else tuple(methods.split(","))
    settings = ThroughputSettings(*load, ratio, policy, target_ttft, skew, seed, named)
    context = chunks * chunk_tokens + question_tokens + answer_tokens + 256
    with status("Measuring") as say, open_workbench(model.choice(engine), context=context) as place:
        result = bench_throughput(place, settings, say)
    if as_json:
        print_json(result)
        return
    echo(_heading(result))
    echo(f"requests/s with a median TTFT of {seconds(result['settings']['target_ttft_s'])}\n")
    rows = [["", "idle TTFT", "requests/s", "tokens computed"]]
    names = METHOD_NAMES | {"reorder": "prefix caching, reordered", "reorder+blend": "blend, reordered"}
    for name, method in result["methods"].items():
        computed = f"{method['points'][0]['computed_tokens']:,.0f}"
        rows.append([names[name], seconds(method["idle_ttft_s"]), f"{method['requests_per_s']:.2f}", computed])
    echo(table(rows))
    others = [name for name in result["methods"] if name not in {"full", "blend"}]
    times = [f"{result[f'blend_vs_{name}']:.1f} times those of {names[name]}" for name in others]
    full = f"{result['blend_vs_full']:.1f} times the requests of {names['full']}"
    echo(f"\nThe blend serves {', '.join([full, *times])}.")


@bench.command()
@takes_groups
def streams(
    *,
    engine: options.Engine = "vllm",
    model: BenchOptions,
    running: Annotated[int, typer.Option("--streams", min=1, help="Answers being streamed.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="RAG prompts that arrive meanwhile.")] = 4,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens in each question.")] = 32,
    ratio: options.Ratio = None,
    repeat: Repeat = 3,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the inter-token times of running streams while new prompts are blended, against ordinary prefill."""
    from cacheblend_lab.bench import StreamsSettings, bench_streams, open_workbench

    settings = StreamsSettings(running, prompts, chunks, chunk_tokens, question_tokens, ratio, repeat, seed)
    with status("Measuring") as say, open_workbench(model.choice(engine)) as place:
        result = bench_streams(place, settings, say)
    if as_json:
        print_json(result)
        return
    echo(_heading(result))
    rows = [["inter-token time while prompts arrive", "median", "p99", "longest"]]
    for name, method in result["methods"].items():
        rows.append([METHOD_NAMES[name], *(seconds(method[f"{what}_s"]) for what in ("p50", "p99", "max"))])
    echo(table(rows))
    echo(f"\np99 with blends is {result['p99_blend_vs_full']:.2f} times that with ordinary prefill.")


for other in (sweeps.controller, shapes, sweeps.chunks, sweeps.batch, sweeps.ratio, sweeps.devices):
    bench.command()(other)


def _print_ttft(result: dict[str, Any]) -> None:
    settings, methods = result["settings"], result["methods"]
    full = median(methods["full"]["ttft_s"])
    rows = [["", "TTFT", "speed-up", "tokens computed", "waited for KV", "peak memory"]]
    for name, label in METHOD_NAMES.items():
        method = methods[name]
        time = median(method["ttft_s"])
        rows.append(
            [
                f"{label}, {settings['ratio']:.0%}" if name == "blend" else label,
                seconds(time),
                f"{full / time:.1f}x",
                f"{method['computed_tokens']:,}",
                seconds(median(method["load_s"])),
                size(method["peak_memory_bytes"]) if method["peak_memory_bytes"] is not None else "-",
            ]
        )
    if "plain_transformers" in result:
        plain = result["plain_transformers"]
        time = median(plain["ttft_s"])
        prompt = f"{settings['prompt_tokens']:,}"
        rows.append(
            ["plain transformers", seconds(time), f"{full / time:.1f}x", prompt, "-", size(plain["peak_memory_bytes"])]
        )
    echo(_heading(result))
    echo(
        f"{settings['chunks']} chunks of {settings['chunk_tokens']} tokens, a question of {settings['question_tokens']}; "
        f"{size(result['chunk_kv_bytes'])} of KV {'on disk' if settings['kv'] == 'disk' else 'in RAM'}"
        f"{', page cache cold' if settings['cold'] else ''}; medians of {settings['repeat']} interleaved rounds\n"
    )
    echo(table(rows))
    if "cold_read" in result:
        read = result["cold_read"]
        echo(
            f"\nA plain cold read of the same {size(read['bytes'])} takes {seconds(median(read['read_s']))} "
            f"({read['bytes_per_s'] / 1e9:.2f} GB/s): no blend of all of it can be faster than "
            f"{read['speedup_if_reading_were_all']:.1f}x."
        )


def _heading(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    libraries = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{result['model']} in {settings['dtype']} on {where}; {libraries}"
