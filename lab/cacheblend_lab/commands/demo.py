"""Runs `cacheblend demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import open_engine, open_pipeline, store_directory, with_model
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions, ModelOptions, takes_groups
from cacheblend_rag.console.output import echo, print_json, progress, seconds, size, status, table
from cacheblend_rag.demo.bundle import demo_store_name
from cacheblend_rag.engines.models import BUNDLED_MODEL, is_bundled
from cacheblend_rag.errors import InputError, ModelError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cacheblend_lab.comparison import DemoRow
    from cacheblend_rag.rag.indexing import IndexProgress, IndexReport
    from cacheblend_rag.rag.pipeline import RagPipeline

_PASSAGES: Final = 8
_KINDS = {
    "single": "one chunk says it all",
    "cross": 'one chunk speaks of "it" or "she", and another one holds the name',
    "two_hop": "two facts have to be put together",
    "two_hop_cross": "two facts, and a reference from one chunk to another",
}


@takes_groups
def demo(
    *,
    documents: Annotated[
        Path | None,
        typer.Option(
            help="Compare on passages of the text in this directory instead, by a model of your own or smollm2."
        ),
    ] = None,
    store: options.Store = None,
    model: ModelOptions,
    as_json: options.AsJSON = False,
) -> None:
    """Index a bundled corpus with a bundled model, ask questions, and compare four ways to handle the prompt.

    With --documents, measure how close the methods come to full recompute on your text, and how much sooner the first
    token comes, in about three minutes with smollm2.
    """
    if documents is not None:
        _on_documents(model, documents, as_json)
        return
    if not is_bundled(model.model) or model.dtype or model.writer:
        raise InputError("The bundled corpus is for the bundled model; give --documents DIR for another one.")
    directory = store or store_directory(None).parent / demo_store_name(model.device)
    bundled = EngineOptions(BUNDLED_MODEL, device=model.device, threads=model.threads)
    with open_pipeline(bundled, directory, BudgetOptions(), must_exist=False) as pipeline:
        from cacheblend_lab.comparison import as_json as rows_as_json
        from cacheblend_lab.comparison import run_demo
        from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions

        with progress("Indexing") as show:

            def step(at: IndexProgress) -> None:
                show(at.planned_done, at.plan.chunks if at.plan else 0, Path(at.path).name)

            report = pipeline.index([bundled_corpus()], step)
        screen = None if as_json else _Screen(pipeline, report)
        rows: list[DemoRow] = []
        count = len(bundled_questions())
        with status("Asking") if screen is None else screen.status("Asking") as say:
            for row in run_demo(pipeline):
                rows.append(row)
                if screen is not None and row.shown:
                    screen.question(row)
                say(f"{len(rows)} of {count} questions")
        if screen is None:
            print_json({"model": pipeline.engine.fingerprint.name, **rows_as_json(rows)})
        else:
            screen.totals(rows, directory)


def _on_documents(chosen: ModelOptions, documents: Path, as_json: bool) -> None:
    """Compare the methods on the user's documents; print a message if no model was named and smollm2 is missing."""
    from cacheblend_lab.comparison import compare_on_documents
    from cacheblend_rag.calibrate.prompts import collect_prompts
    from cacheblend_rag.retrieval.documents import find_documents

    find_documents([documents])  # raises InputError for a mistyped path before a model is loaded
    if not as_json:
        echo(
            f"{_PASSAGES} passages of {documents}, each behind four others: about three minutes of two cores by smollm2."
        )
    try:
        opened = open_engine(with_model(chosen))
    except ModelError as error:
        if chosen.model is not None:
            raise
        echo(f"Nothing is compared: {error}", err=True)
        return
    with opened as engine:
        with progress("Comparing:") as show:
            prompts = collect_prompts(engine, None, None, _PASSAGES, documents)
            found = compare_on_documents(engine, prompts, lambda n: show(n, len(prompts), f"passage {n + 1}"))
        name, writer = engine.fingerprint.name, engine.writer
    if as_json:
        methods = {key: asdict(row) for key, row in found.items()}
        print_json({"model": name, "prompts": len(prompts), "methods": methods})
        return
    rows = [["", "first token", "computed", "KL, nats", "tokens agree"]]
    for key, row in found.items():
        near = [_mean(row.kl, row.kl_interval, ".3f"), _mean(row.agrees, row.agrees_interval, ".1%")]
        near = near if row.kl else ["exact", "exact"]
        rows.append([f"{key} {row.how}".rstrip(), f"{row.sooner:.1f}x", f"{row.compute:.0%}", *near])
    tokens = fmean(len(each.prompt.token_ids) for each in prompts)
    echo(
        f"\n{table(rows)}\n\n{name}{', chunks by its KV writer' if writer else ''}; prompts of {tokens:,.0f} tokens. "
        "First token: how many times as soon, median.\n"
        "KL and agreement: with full recompute, over the text that goes on there, 95% intervals.\n"
        "What weights of few bits cost beside it: docs/results.md, On a real model.\nHow much your model needs on your text: "
        f"cacheblend doctor --calibrate --documents {documents}"
    )


def _mean(value: float, interval: tuple[float, float] | None, form: str) -> str:
    between = "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"
    return f"{value:{form}}{between}"


class _Screen:
    """Prints an explanation of the four methods, a few questions in full, and the totals over all questions."""

    def __init__(self, pipeline: RagPipeline, report: IndexReport):
        from rich.console import Console

        from cacheblend_rag.blending.policies import policy

        self._console: Console = Console(highlight=False, soft_wrap=False)
        profile = pipeline.engine.profile
        dependent = "that depend most on what stands before them"
        chosen = f"{dependent}, ranked at indexing" if policy(profile.policy).needs_static else "whose KV deviates most"
        stats = pipeline.chunks.stats()
        store: Any = getattr(pipeline.engine, "store", None)
        held = (
            f", {size(store.stats().tiers[-1].nbytes)} of KV cache" if store is not None and store.stats().tiers else ""
        )
        did = f"indexed in {seconds(report.seconds)}" if report.added or report.changed else "indexed before"
        self._say(
            f"[bold]CacheBlend demo[/]: {stats.documents} fictional documents, {stats.chunks} chunks, {stats.tokens:,} "
            f"tokens, {did}{held}\n\n"
            "A RAG prompt is an instruction, the retrieved chunks and the question. The KV cache of every chunk was computed "
            "once, while indexing. What becomes of it when a question comes makes the difference:\n"
        )
        table = self._table()
        table.add_row("full recompute", "compute all of the prompt: the quality to reach, and the wait to avoid")
        table.add_row("prefix caching", "reuse the first chunk, compute the rest")
        table.add_row("full KV reuse", "reuse every chunk as it is: fast, but no chunk has ever seen another")
        table.add_row(
            "[bold]blend[/]",
            f"reuse every chunk, and recompute the {profile.ratio:.0%} of its tokens {chosen}: what this library does",
        )
        self._console.print(table)
        self._say(
            "\nFirst a few questions one by one: the first that full recompute gets right and full KV reuse does not, whatever "
            "the blend makes of it, and one that a single chunk answers. The table at the end is of all of them."
        )

    @contextmanager
    def status(self, label: str) -> Iterator[Callable[[str], None]]:
        """Show a status line below the printed text; Rich requires one console for both."""
        with self._console.status(label) as shown:
            yield lambda text: shown.update(f"{label}: {text}")

    def question(self, row: DemoRow) -> None:
        """Print one question with every method's answer."""
        files: dict[str, list[int]] = {}
        for source in row.sources:
            files.setdefault(Path(source.path).name, []).append(source.ordinal)
        sources = "; ".join(f"{name}, chunk {', '.join(map(str, sorted(numbers)))}" for name, numbers in files.items())
        self._console.rule(style="dim")
        self._say(f"[bold]{row.question.question}[/]   [dim]({_KINDS[row.question.kind]})[/]")
        self._say(f"[dim]sources: {sources}; prompt of {row.prompt_tokens:,} tokens[/]\n")
        table = self._table("", "answer", "", ">first token", ">tokens computed")
        for name, found in row.answers.items():
            mark = "[green]right[/]" if found.right else "[red]wrong[/]"
            table.add_row(_bold(name), found.answer, mark, seconds(found.ttft_s), f"{found.computed_tokens:,}")
        self._console.print(table)

    def totals(self, rows: list[DemoRow], directory: Path) -> None:
        """Print the table over all questions, and a short conclusion."""
        from cacheblend_lab.comparison import totals

        found = totals(rows)
        full, reuse, blend = (found[name] for name in ("full recompute", "full KV reuse", "blend"))
        self._console.rule(style="dim")
        self._say(f"[bold]All {len(rows)} questions[/]\n")
        table = self._table("", ">right", ">first token (median)", ">speed-up", ">tokens computed (mean)")
        for name, total in found.items():
            table.add_row(
                _bold(name),
                f"{total.right} of {total.questions}",
                seconds(total.ttft_s),
                f"{full.ttft_s / total.ttft_s:.1f}x",
                f"{total.computed_tokens:,.0f}",
            )
        self._console.print(table)
        self._say(
            f"Full KV reuse answers {_against(reuse.right, full.right)} full recompute. The blend answers "
            f"{_against(blend.right, full.right)} full recompute, and its first token comes "
            f"{full.ttft_s / blend.ttft_s:.1f} times as soon. "
            "What full recompute gets wrong was not retrieved, or is too hard for the small bundled model.\n\n"
            f"Go on asking:  [bold]cacheblend chat --store {directory}[/]\n"
            "Your own:      [bold]cacheblend index FILES --store DIR --model MODEL[/]\n"
            "Real text:     [bold]cacheblend demo --documents DIR[/]"
        )

    def _say(self, text: str) -> None:
        self._console.print(text)

    @staticmethod
    def _table(*columns: str) -> Table:
        from rich.table import Table

        table = Table(box=None, padding=(0, 3, 0, 0), show_header=bool(columns), header_style="dim", pad_edge=False)
        for name in columns or ("", ""):
            table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
        return table


def _bold(name: str) -> str:
    return f"[bold]{name}[/]" if name == "blend" else name


def _against(right: int, full: int) -> str:
    if right == full:
        return "as many questions right as"
    return f"{abs(full - right)} {'fewer' if right < full else 'more'} right than"
