"""Runs `cacheblend index`."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import INTERRUPTED_EXIT_CODE
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import (
    index_directory,
    model_for,
    open_inventory,
    open_pipeline,
    store_directory,
    with_model,
)
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions, takes_groups
from cacheblend_rag.console.output import counted, echo, print_json, progress, seconds, size
from cacheblend_rag.engines.models import BUNDLED_MODEL
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.printable import in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from cacheblend_rag.calibrate.spot_check import SpotCheck
    from cacheblend_rag.engines.entries import Ranking
    from cacheblend_rag.rag.indexing import IndexProgress, IndexReport
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.rag.planning import IndexPlan, TooMuchKVError
    from cacheblend_rag.retrieval.documents import FoundDocuments

_DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only list the chunks, tokens, disk space and time of each document; store nothing."
    ),
]


@takes_groups
def index(
    paths: Annotated[
        list[str],  # an empty Path would be the current directory
        typer.Argument(
            help="Files and directories: text, Markdown, HTML, PDF, Word, slides, tables, JSON, source code."
        ),
    ],
    *,
    include: Annotated[
        list[str] | None,
        typer.Option(help="In directories, read only files that match this pattern, as 'guides/*'; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Skip files and directories that match this pattern, as '*.json'; may be repeated."),
    ] = None,
    store: options.Store = None,
    namespace: options.Namespace = "default",
    model: EngineOptions,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=16, help="Maximum number of tokens in a chunk (default: 512).")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(min=0, help="Tokens that neighbouring chunks share (default: 0).")
    ] = None,
    embedding: options.Embedding = None,
    budgets: BudgetOptions,
    ranking: options.Ranking = None,
    dry_run: _DryRun = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation if the KV exceeds the store's room.")
    ] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Split documents into chunks, compute and store their KV, and make them searchable. Unchanged files are skipped.

    Ctrl-C loses no stored KV: run the same command again to continue.
    """
    from cacheblend_rag.retrieval.documents import find_documents
    from cacheblend_rag.store.files import make_home

    # Raises InputError for a mistyped path before a model is loaded.
    found = find_documents(paths, include or (), exclude or ())
    home = index_directory(store, namespace)
    chosen = _with_model(model, home, found)
    root = store_directory(store)
    cut: dict[str, Any] = {"chunk_tokens": chunk_tokens, "overlap": overlap, "embedding": embedding}
    if dry_run:
        from cacheblend_rag.cli.estimating import dry_run as print_estimate

        print_estimate(chosen, budgets, found, root, namespace, ranking, as_json, **cut)
        return
    if root.is_dir():
        with suppress(OSError):  # reported below
            make_home(root, namespace)
    opened = open_pipeline(chosen, store, budgets, must_exist=False, namespace=namespace, **cut)
    looks = partial(_unchanged, chosen, budgets, found, root, namespace, **cut)
    report, check = _index(found, home, opened, ranking, looks, yes)
    _print_report(report, check, as_json)
    if not (report.added or report.changed or report.unchanged or report.removed):
        raise typer.Exit(2)


def _with_model(given: EngineOptions, home: Path, found: FoundDocuments) -> EngineOptions:
    """Return the options with a model; raises InputError if the index is the bundled model's and the documents are not."""
    fitting = model_for(found.files)
    chosen = with_model(given, home, fitting)
    if given.model is None and chosen.model == BUNDLED_MODEL != fitting:
        raise InputError(
            f"The index in {home} is the bundled model's, which knows the documents of `cacheblend demo` alone. "
            "Index these into another directory (--store), or give --model bundled."
        )
    return chosen


def _unchanged(
    chosen: EngineOptions, budgets: BudgetOptions, found: FoundDocuments, root: Path, namespace: str, **cut: Any
) -> IndexReport | None:
    """Return the report of a run that has nothing to do; None if there is work, or only a model can decide."""
    from cacheblend_rag.rag.indexing import nothing_to_read
    from cacheblend_rag.retrieval.index import ChunkIndex

    if budgets.given or chosen != EngineOptions(chosen.model, None, chosen.dtype, chosen.threads, chosen.writer):
        return None
    if not ChunkIndex.exists(index_directory(root, namespace)):
        return nothing_to_read(found, {})
    with open_inventory(root, namespace) as inventory:
        return inventory.unchanged(found, chosen.model, chosen.dtype, chosen.writer, **cut)


def _index(
    found: FoundDocuments,
    directory: Path,
    opened: AbstractContextManager[RagPipeline],
    ranking: Ranking | None,
    looks: Callable[[], IndexReport | None],
    yes: bool,
) -> tuple[IndexReport, SpotCheck | None]:
    from cacheblend_rag.rag.locking import indexing_into
    from cacheblend_rag.rag.planning import TooMuchKVError

    shown = _Shown()
    try:
        with indexing_into(directory):
            if (report := looks()) is not None:
                return report, None
            with opened as pipeline:
                if ranking is not None:
                    pipeline.engine.ranking = ranking
                try:
                    return _index_and_check(pipeline, found, shown, yes)
                except TooMuchKVError as error:
                    _ask(error)
                return _index_and_check(pipeline, found, shown, True)
    except KeyboardInterrupt:
        echo(f"\n{shown.interrupted()}", err=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _index_and_check(
    pipeline: RagPipeline, found: FoundDocuments, shown: _Shown, beyond_budget: bool
) -> tuple[IndexReport, SpotCheck | None]:
    from cacheblend_rag.calibrate.spot_check import spot_check

    with progress("Indexing") as shown.show:
        report = pipeline.index(found, shown, beyond_budget=beyond_budget)
        shown.show(1, 1, "(asking a few questions)")
        return report, spot_check(pipeline, report.tokens, report.seconds)


def _ask(error: TooMuchKVError) -> None:
    """Ask whether to index more than the store can hold; end the command unless the user agrees.

    Raises:
        StoreError: Standard input is not a terminal.
    """
    todo = f"{error.what}. The KV of older documents, and of much of these, would be computed and dropped."
    if not sys.stdin.isatty():
        raise StoreError(
            f"{todo} Give it more with --disk-budget, or in --kv, or leave files out with --exclude (--dry-run lists what "
            "each takes); --yes goes on all the same."
        )
    typer.confirm(f"{todo}\nIndex them all the same?", abort=True, err=True)


class _Shown:
    """Prints how much there is to index, once the amount is known, and shows the progress."""

    def __init__(self) -> None:
        self.show: Callable[[float, int, str], None] = lambda done, total, at: None
        self._at: IndexProgress | None = None
        self._planned, self._sized = False, False

    def __call__(self, at: IndexProgress) -> None:
        self._at = at
        name = Path(at.path).name
        if at.plan is None:
            self.show(at.documents_done, at.documents, f"(reading {name})")
            return
        self._tell(at.plan)
        if at.embedded:
            name = f"{name} (embedding, {at.embedded:,} of {at.chunks:,})"
        if at.plan.chunks:
            self.show(at.planned_done, at.plan.chunks, name)

    def _tell(self, plan: IndexPlan) -> None:
        if not self._planned and plan.documents:
            self._planned = True
            todo = f"To index: {counted(plan.documents, 'document')}, {counted(plan.chunks, 'chunk')}"
            known = plan.missing is not None
            rest = f"; {plan.tokens:,} tokens have no stored KV yet." if known else f", {plan.tokens:,} tokens."
            echo(f"{todo}{rest}", err=True)
        if not self._sized and plan.kv_bytes is not None:
            self._sized = True
            echo(_room_line(plan, plan.kv_bytes), err=True)

    def interrupted(self) -> str:
        """Return a message about the results that an interrupted run has stored."""
        at = self._at
        if at is None or at.plan is None:
            return "Stopped before anything was computed. Run the same command again to start over."
        kept = f"{at.documents_done} of {counted(at.documents, 'document')} indexed"
        if at.chunks_done < at.chunks:
            name = in_one_line(Path(at.path).name)
            kept += f", and the KV of {at.chunks_done:,} of the {at.chunks:,} chunks of {name} is stored"
        return f"Stopped. What is done is kept: {kept}. Run the same command again to go on."


def _room_line(plan: IndexPlan, expected: int) -> str:
    line = f"Their KV will take about {size(expected)}"
    if plan.room_bytes is None:
        return f"{line}."
    if plan.fits:
        return f"{line}; the store has {size(plan.room_bytes)} left for it."
    return (
        f"Warning: {line[0].lower()}{line[1:]}, but the store has only {size(plan.room_bytes)} left: the KV of older "
        "chunks will be dropped, and computed when it is asked for. Ctrl-C, and give it more with --disk-budget, or in --kv."
    )


def _print_report(report: IndexReport, check: SpotCheck | None, as_json: bool) -> None:
    for skipped in report.skipped:
        echo(in_one_line(f"Skipped {skipped.path}: {skipped.reason}"), err=True)
    if as_json:
        print_json({**asdict(report), "check": None if check is None else asdict(check)})
        return
    fates = ("added", "changed", "unchanged", "removed", "skipped")
    counts = [(len(getattr(report, fate)), fate) for fate in fates]
    documents = ", ".join(f"{count} {fate}" for count, fate in counts if count) or "none found"
    echo(f"documents  {documents}")
    if report.added or report.changed:
        echo(f"chunks     {report.chunks:,}; KV of {report.tokens:,} tokens computed in {seconds(report.seconds)}")
    if report.ranked:
        cost = f" in {seconds(report.rank_s)} of that" if report.rank_s else ""
        echo(f"ranked     {report.ranked:,} chunks{cost}: which of their tokens depend most on what stands before them")
    if report.kv_bytes is not None:
        echo(f"KV         {size(report.kv_bytes)} stored")
    for reason in sorted(set(report.without_kv.values())):
        count = sum(reason == other for other in report.without_kv.values())
        echo(f"Warning: {count} chunks have no stored KV and are computed when asked for: {reason}", err=True)
    if check is not None and check.nothing:
        echo(f"checked    nothing: {check.nothing}")
    elif check is not None:
        echo(
            f"checked    {check.same} of {counted(check.questions, 'answer')} as full recompute gives it, the first token "
            f"{check.speedup:.1f}x sooner"
        )
        if check.same < check.questions:
            echo(
                "           What differs may be as good. `cacheblend doctor --calibrate` finds how much to recompute here; "
                "--quality exact changes nothing."
            )
