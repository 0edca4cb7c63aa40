"""`cacheblend eval` and `cacheblend figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.app import app
from cacheblend_rag.cli.engines import ModelOptions, open_engine
from cacheblend_rag.cli.output import print_json, progress, seconds, table

if TYPE_CHECKING:
    from cacheblend_rag.evaluation.evaluate import EvalResult

_DATA = "Data set"
_STORE_BYTES = 2 << 30

Dataset = Annotated[
    str,
    typer.Option(
        help="demo, musique, 2wikimqa, hotpotqa, samsum, multi_news, or a file of any of their formats, of LongBench's, or "
        'of JSON lines {"question", "answers", "chunks" or "documents"}.',
        rich_help_panel=_DATA,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Your copy of the named data set: its file, or a directory that holds it (default: $CACHEBLEND_DATA).",
        rich_help_panel=_DATA,
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="Most questions.", rich_help_panel=_DATA)]
Seed = Annotated[int, typer.Option(help="Draws questions, examples and demo documents.", rich_help_panel=_DATA)]
Kinds = Annotated[
    str | None,
    typer.Option(
        help="Only these kinds of questions, separated by commas (demo: single, cross, two_hop, two_hop_cross, comparison; "
        "all but the last by default).",
        rich_help_panel=_DATA,
    ),
]
ChunkTokens = Annotated[int, typer.Option(min=16, help="Most tokens in a chunk.", rich_help_panel=_DATA)]
Engine = Annotated[Literal["transformers"], typer.Option(help="Which engine to evaluate.", rich_help_panel="Model")]
Out = Annotated[
    Path,
    typer.Option(help="Directory for answers, numbers and report; a later run of the same settings goes on there."),
]


@app.command("eval")
def evaluate_command(
    engine: Engine = "transformers",
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.DType = None,
    threads: options.Threads = None,
    dataset: Dataset = "demo",
    data: Data = None,
    limit: Limit = 200,
    seed: Seed = 0,
    kinds: Kinds = None,
    k: options.K = 6,
    chunk_tokens: ChunkTokens = 512,
    methods: Annotated[
        str,
        typer.Option(
            help="full, prefix, reuse, blend, map_reduce, map_rerank, langchain_map_reduce, langchain_map_rerank, and further "
            "blends as POLICY@RATIO or POLICY@RATIO@LAYERS (sink@0.1, hkvd@0.15@1+3); separated by commas.",
        ),
    ] = "full,prefix,reuse,blend",
    ratio: options.Ratio = None,
    policy: options.Policy = "hkvd",
    check_layers: options.CheckLayers = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer (default: 32; summaries 96 and 256).")
    ] = None,
    out: Out = Path("report"),
    as_json: options.AsJSON = False,
) -> None:
    """Answer a data set by several methods: how well, how soon, how much computed, with 95% intervals."""
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.evaluation.prepare import Preparation
    from cacheblend_rag.store import MemoryStore

    blend = BlendSettings(ratio, policy, options.layers(check_layers))
    preparation = Preparation(k, chunk_tokens, max_tokens=max_tokens)
    with open_engine(ModelOptions(model, device, dtype, threads), MemoryStore(_STORE_BYTES)) as opened:
        from cacheblend_rag.evaluation.evaluate import EvalSettings, evaluate
        from cacheblend_rag.evaluation.report import write_report

        settings = EvalSettings(
            dataset, data, _names(methods), blend, limit, seed, None if kinds is None else _names(kinds), preparation
        )
        with progress("Evaluating") as show:
            result = evaluate(opened, settings, out, show)
    assert result.answers_file is not None
    numbers = result.answers_file.with_name(result.answers_file.name.replace("answers-", "eval-"))
    numbers.with_suffix(".json").write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
    page = write_report(numbers.with_suffix(".html"), result)
    if as_json:
        print_json({**result.as_json(), "report_file": str(page)})
        return
    _print_result(result)
    typer.echo(f"\nanswers  {result.answers_file}\nreport   {page}")


@app.command()
def figures(
    engine: Engine = "transformers",
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.DType = None,
    threads: options.Threads = None,
    dataset: Dataset = "demo",
    data: Data = None,
    limit: Limit = 40,
    seed: Seed = 0,
    kinds: Kinds = None,
    k: options.K = 6,
    chunk_tokens: ChunkTokens = 512,
    ratio: options.Ratio = None,
    policy: options.Policy = "hkvd",
    check_layers: options.CheckLayers = None,
    only: Annotated[
        str | None, typer.Option(help="Figures of the paper to make, as 2,6,12-17 (default: all there are).")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed rounds of each point of figures 15 and 17.")] = 3,
    out: Out = Path("report"),
) -> None:
    """Make the paper's figures for a model: PNG, SVG and CSV of each, and one HTML page. Goes on where it stopped."""
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.evaluation.prepare import Preparation
    from cacheblend_rag.store import MemoryStore

    blend = BlendSettings(ratio, policy, options.layers(check_layers))
    with open_engine(ModelOptions(model, device, dtype, threads), MemoryStore(_STORE_BYTES)) as opened:
        from cacheblend_rag.evaluation.evaluate import EvalSettings
        from cacheblend_rag.evaluation.figures import Context, make_figures, parse_numbers

        settings = EvalSettings(
            dataset,
            data,
            blend=blend,
            limit=limit,
            seed=seed,
            kinds=None if kinds is None else _names(kinds),
            preparation=Preparation(k, chunk_tokens),
        )
        with progress("Figures") as show:
            page = make_figures(Context(opened, settings, out, repeat), parse_numbers(only), show)
    typer.echo(page)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print_result(result: EvalResult) -> None:
    settings = result.settings
    typer.echo(
        f"{settings['model']} on {settings['questions']} questions of {Path(settings['dataset']).name}, up to {settings['k']} "
        f"chunks of {settings['chunk_tokens']} tokens, {settings['dtype']} on {settings['device']}; means with 95% intervals\n"
    )
    typer.echo(table(_rows(result.summary["methods"], result.labels)))
    for kind, found in result.summary.get("kinds", {}).items():
        count = next(iter(found.values()))["n"]
        typer.echo(f"\n{kind or 'no kind'}, {count} questions\n")
        typer.echo(table(_rows(found, result.labels)))


def _rows(methods: dict[str, Any], labels: dict[str, str]) -> list[list[str]]:
    rows = [["", "EM", "F1", "Rouge-L", "agrees with full", "first-token KL", "TTFT median", "p90", "computed"]]
    for name, found in methods.items():
        # The report has the other intervals; a terminal has no room for them.
        cells = [_with_interval(found, "em"), f"{found['f1']:.1%}", f"{found['rouge_l']:.1%}"]
        cells.append(_with_interval(found, "agreement_with_full"))
        kl = found["first_token_kl"]
        ttft = found["ttft_s"]
        rows.append(
            [
                labels[name],
                *cells,
                "-" if kl is None else f"{kl:.3g}",
                seconds(ttft["median"]),
                seconds(ttft["p90"]),
                f"{found['computed_tokens']:,.0f}",
            ]
        )
    return rows


def _with_interval(found: dict[str, Any], key: str) -> str:
    if found[key] is None:
        return "-"
    low, high = found["intervals_95"][key]
    return f"{found[key]:.1%} [{low:.1%}, {high:.1%}]"
