"""Runs `cacheblend bench shapes`, which compares every quality with prefix caching, over prompt shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from cacheblend_lab.commands.bench_options import BenchOptions, RandomSeed, Repeat
from cacheblend_lab.commands.sweeps import parse_numbers
from cacheblend_rag.console import options
from cacheblend_rag.console.groups import takes_groups
from cacheblend_rag.console.output import echo, print_json, status

_HEADINGS: Final = " front    chunks  question  quality     mode  computed  sooner"


@takes_groups
def shapes(
    *,
    engine: options.Engine = "transformers",
    model: BenchOptions,
    fronts: Annotated[
        str, typer.Option(help="Tokens in front of the first chunk; 0 for the header of stored chunks.")
    ] = ("0,200,2000"),
    chunks: Annotated[str, typer.Option(help="Numbers of chunks.")] = "1,6,24",
    chunk_tokens: Annotated[str, typer.Option(help="Tokens in each chunk.")] = "50,512",
    questions: Annotated[str, typer.Option(help="Tokens in the question.")] = "10,200,2000",
    repeat: Repeat = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Compute the front, too, instead of finding it kept.")] = False,
    seed: RandomSeed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the time to first token of each quality against a prefill with prefix caching, over prompt shapes."""
    from cacheblend_lab.bench import ShapesSettings, bench_shapes, open_workbench

    wanted = (
        parse_numbers(fronts, "--fronts", int, least=0),
        parse_numbers(chunks, "--chunks", int),
        parse_numbers(chunk_tokens, "--chunk-tokens", int),
        parse_numbers(questions, "--questions", int),
    )
    settings = ShapesSettings(*wanted, repeat, cold, seed)
    with status("Measuring") as say, open_workbench(model.choice(engine), context=settings.longest + 256) as place:
        if not as_json:
            echo(_HEADINGS)
        result = bench_shapes(place, settings, say, None if as_json else _print_row)
    if as_json:
        print_json(result)
        return
    echo(f"The least is {min(row['sooner'] for row in result['rows']):.2f}x.")


def _print_row(row: Mapping[str, Any]) -> None:
    """Print a row at once: a long run that is cut off leaves what it has measured."""
    chunks = f"{row['chunks']} x {row['chunk_tokens']}"
    echo(
        f"{row['front']:>6,} {chunks:>9} {row['question']:>9,} {row['quality']:>8} {row['mode']:>8} {row['work']:>9.0%} "
        f"{row['sooner']:>6.2f}x"
    )
