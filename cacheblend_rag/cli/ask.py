"""`cacheblend index`, `ask` and `chat`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.app import app
from cacheblend_rag.cli.bundled import left_to_bundled, warn_if_not_bundled
from cacheblend_rag.cli.chat import Chat, reuse_line, source_lines
from cacheblend_rag.cli.engines import open_pipeline
from cacheblend_rag.cli.groups import BudgetOptions, EngineOptions, QuestionOptions, SamplingOptions, takes_groups
from cacheblend_rag.cli.output import print_json, progress, seconds, size

if TYPE_CHECKING:
    from cacheblend_rag.rag.indexing import IndexProgress, IndexReport


@app.command()
@takes_groups
def index(
    paths: Annotated[list[Path], typer.Argument(help="Files and directories: txt, md, html, pdf.")],
    *,
    store: options.Store = None,
    model: EngineOptions,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens in a chunk (default: 512).")] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens neighbouring chunks share (default: 0).")] = None,
    embedding: Annotated[
        str | None, typer.Option(help="sentence-transformers model for retrieval (default: all-MiniLM-L6-v2).")
    ] = None,
    budgets: BudgetOptions,
    rank: options.Rank = None,
    as_json: options.AsJSON = False,
) -> None:
    """Split documents into chunks, compute and store their KV, and make them searchable. Unchanged files are skipped."""
    if left_to_bundled(model):
        warn_if_not_bundled(paths)
    with (
        open_pipeline(
            model,
            store,
            budgets,
            must_exist=False,
            chunk_tokens=chunk_tokens,
            overlap=overlap,
            embedding=embedding,
        ) as pipeline,
        progress("Indexing") as show,
    ):

        def step(at: IndexProgress) -> None:
            show(at.documents_done, at.documents, f"{Path(at.path).name}, {at.chunks_done} chunks")

        if rank is not None:
            pipeline.engine.rank = rank
        report = pipeline.index(paths, step)
    for skipped in report.skipped:
        typer.echo(f"Skipped {skipped.path}: {skipped.reason}", err=True)
    print_json(asdict(report)) if as_json else _print_report(report)
    if report.skipped and not (report.added or report.changed or report.unchanged or report.removed):
        raise typer.Exit(2)


def _print_report(report: IndexReport) -> None:
    counts = {
        "added": len(report.added),
        "changed": len(report.changed),
        "unchanged": len(report.unchanged),
        "removed": len(report.removed),
        "skipped": len(report.skipped),
    }
    documents = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none found"
    typer.echo(f"documents  {documents}")
    if report.added or report.changed:
        typer.echo(
            f"chunks     {report.chunks:,}; KV of {report.tokens:,} tokens computed in {seconds(report.seconds)}"
        )
    if report.ranked:
        cost = f" in {seconds(report.rank_s)} of that" if report.rank_s else ""
        typer.echo(
            f"ranked     {report.ranked:,} chunks{cost}: which of their tokens depend most on what stands before them"
        )
    if report.kv_bytes is not None:
        typer.echo(f"KV         {size(report.kv_bytes)} stored")
    for reason in sorted(set(report.without_kv.values())):
        count = sum(reason == other for other in report.without_kv.values())
        typer.echo(f"Warning: {count} chunks have no stored KV and are computed when asked for: {reason}", err=True)


@app.command()
@takes_groups
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    how: QuestionOptions,
    as_json: options.AsJSON = False,
) -> None:
    """Answer one question from the indexed documents."""
    sampling, settings = how.sampling.params(), how.blend.settings()
    with open_pipeline(how.model, how.store, how.budgets, k=how.k) as pipeline:
        answer = pipeline.ask(question, sampling, settings)
    if as_json:
        print_json(answer.to_dict())
        return
    typer.echo(answer.answer)
    typer.echo()
    for line in (*source_lines(answer), reuse_line(answer)):
        typer.echo(line)


_LONGER = QuestionOptions(sampling=SamplingOptions(max_tokens=256))


@app.command()
@takes_groups
def chat(how: QuestionOptions = _LONGER) -> None:
    """Answer questions one after another, streaming. Each is answered from the documents alone. /help lists commands."""
    sampling, settings = how.sampling.params(), how.blend.settings()
    with open_pipeline(how.model, how.store, how.budgets, k=how.k) as pipeline:
        Chat(pipeline, sampling, settings).run(sys.stdin.isatty())
