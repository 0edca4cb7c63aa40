"""Runs `cacheblend index --dry-run`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.console import engines
from cacheblend_rag.console.engines import index_directory
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions
from cacheblend_rag.console.output import counted, duration, echo, print_json, progress, size, table
from cacheblend_rag.errors import InputError
from cacheblend_rag.printable import in_one_line

if TYPE_CHECKING:
    from cacheblend_rag.engines.entries import Entries, Ranking
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.rag.planning import IndexEstimate
    from cacheblend_rag.retrieval.documents import FoundDocuments

_LISTED = 20


def dry_run(
    chosen: EngineOptions,
    budgets: BudgetOptions,
    found: FoundDocuments,
    root: Path,
    namespace: str,
    ranking: Ranking | None,
    as_json: bool,
    **cut: Any,
) -> None:
    """Print the chunks, size and time of indexing ``found`` into the store in ``root``, without changing the store.

    Raises:
        InputError: An option would change the store.
    """
    if chosen.server is None and (changing := [name for name in budgets.given if name in ("--kv", "--encrypt")]):
        raise InputError(f"{', '.join(changing)} changes a store, and --dry-run leaves it as it is. Leave it out.")
    with _opened(chosen, budgets, root, namespace, **cut) as (pipeline, kept), progress("Estimating") as show:
        from cacheblend_rag.rag.planning import estimate

        if ranking is not None:
            pipeline.engine.ranking = ranking
        estimated = estimate(pipeline.engine, pipeline.chunks, found, kept, show)
    if as_json:
        plan = {name: value for name, value in asdict(estimated.plan).items() if name not in ("documents", "each")}
        print_json({**asdict(estimated), "plan": {**plan, "fits": estimated.plan.fits}})
    else:
        _print(estimated)


@contextmanager
def _opened(
    chosen: EngineOptions, budgets: BudgetOptions, root: Path, namespace: str, **cut: Any
) -> Iterator[tuple[RagPipeline, Entries | None]]:
    """Open a pipeline on the existing index, if any, and a temporary store; yield the existing store's entries, too, or None.

    Without an existing store, the temporary store is on the disk of a new store, because that disk limits its size.
    """
    from cacheblend_rag.retrieval.index import ChunkIndex
    from cacheblend_rag.store import open_store

    home, there = index_directory(root, namespace), (root / "kv").is_dir() or (root / "tiers").exists()
    beside = None if there else next(each for each in (root, *root.absolute().parents) if each.is_dir())
    budget = BudgetOptions(disk_budget=None if there else budgets.disk_budget)
    with ExitStack() as open_until_the_end:
        enter = open_until_the_end.enter_context
        scratch = enter(tempfile.TemporaryDirectory(prefix=".cacheblend-dry-run-", dir=beside))
        engine = enter(engines.open_any_engine(chosen, Path(scratch), budget, None)).within(namespace)
        from cacheblend_rag.engines.entries import Entries
        from cacheblend_rag.rag.pipeline import RagPipeline

        kept = None
        if there and engine.entries is not None:
            store = enter(open_store(root, 0, budgets.nbytes()[1]))
            kept = Entries(
                store, engine.fingerprint, engine.header_ids, namespace=engine.namespace, writer=engine.writer
            )
        yield enter(RagPipeline(engine, home if ChunkIndex.exists(home) else scratch, **cut)), kept


def _print(found: IndexEstimate) -> None:
    for skipped in found.skipped:
        echo(in_one_line(f"Skipped {skipped.path}: {skipped.reason}"), err=True)
    plan = found.plan
    if found.unchanged:
        echo(f"{counted(found.unchanged, 'document')} unchanged")
    if not found.documents:
        echo("Nothing to index.")
        return
    rows = [["document", "chunks", "tokens", "KV", "time"]]
    rows += [
        [each.path, f"{each.chunks:,}", f"{each.tokens:,}", size(each.kv_bytes), duration(each.seconds)]
        for each in found.documents[:_LISTED]
    ]
    if len(found.documents) > 1:
        total = counted(len(found.documents), "document")
        rows.append([total, f"{plan.chunks:,}", f"{plan.tokens:,}", size(plan.kv_bytes), duration(found.seconds)])
    echo(table(rows))
    if (more := len(found.documents) - _LISTED) > 0:
        echo(f"The {more:,} smallest are counted, not listed; --json lists all.")
    if plan.kv_bytes is None:
        echo(
            "How large the KV is, and how long it takes, is not known here: none is stored, or another machine stores it."
        )
    elif plan.too_large:
        echo(f"Too much: the store can hold {size(plan.capacity_bytes)}. `cacheblend index` would refuse it.")
    elif plan.room_bytes is not None:
        echo(f"The store has {size(plan.room_bytes)} left{'' if plan.fits else ': older KV would be dropped'}.")
    echo("Nothing was indexed. Sizes and times are estimated by a few chunks; without --dry-run they are indexed.")
