"""Runs `cacheblend store`."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cacheblend_rag.cli import Commands
from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_inventory, store_directory
from cacheblend_rag.console.output import by_steps, echo, print_json, progress, size, status, table

if TYPE_CHECKING:
    from cacheblend_rag.rag.inventory import Inventory
    from cacheblend_rag.store import StoreStats

_IMPORTED_LATE = {"calibrate": "cacheblend_rag.cli.costs:calibrate"}


class _StoreGroup(TyperGroup):
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: Any = ChainMap(Commands(_IMPORTED_LATE), self.commands)  # type: ignore[arg-type]


store = typer.Typer(
    cls=_StoreGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Inspect, verify and shrink a store. Only reembed and calibrate load a model.",
)


@store.command()
def stats(
    directory: options.Store = None, namespace: options.Namespace = "default", as_json: options.AsJSON = False
) -> None:
    """Show the contents of the store, tier by tier. For reads and hits, see answers and a server's metrics."""
    from cacheblend_rag.store import recorded_tiers

    place = store_directory(directory)
    with open_inventory(place, namespace) as inventory:
        kv, index = inventory.stats()
        _say_unlisted(inventory)
    kept_in = recorded_tiers(place)
    if as_json:
        shown = [_tier_json(tier) for tier in kv.tiers]
        contents = {"entries": kv.entries, "bytes": kv.nbytes, "kept_in": kept_in, "tiers": shown}
        print_json({"kv": contents, "index": index and asdict(index)})
        return
    if index is not None:
        echo(
            f"index  {index.documents:,} documents, {index.chunks:,} chunks, {index.tokens:,} tokens, "
            f"{size(index.nbytes)} (embedding {index.embedding})"
        )
    echo(f"KV     {kv.entries:,} entries, {size(kv.nbytes)}" + (f", in {kept_in}" if kept_in else ""))
    echo()
    rows = [["tier", "codec", "entries", "size", "budget"]]
    for tier in kv.tiers:
        held = tier.listed and not tier.out
        rows.append(
            [
                tier.tier,
                _codec(tier),
                f"{tier.entries:,}" if held else "-",
                size(tier.nbytes) if held else "-",
                "none" if tier.budget is None else size(tier.budget),
            ]
        )
    echo(table(rows))
    for tier in kv.tiers:
        if tier.out:
            echo(f"\nThe {tier.tier} tier does not answer: {tier.out}")


def _say_unlisted(inventory: Inventory) -> None:
    """Warn on stderr about tiers that cannot be listed."""
    for name in inventory.store.unlisted:
        echo(
            f"The {name} tier cannot be listed: what it alone holds is neither counted nor checked here, and of it only the KV "
            "of indexed chunks is shown.",
            err=True,
        )


def _codec(tier: StoreStats) -> str:
    return tier.codec.replace("raw", "none")  # the word used in tier addresses


def _tier_json(tier: StoreStats) -> dict[str, Any]:
    held = tier.listed and not tier.out
    return {
        "tier": tier.tier,
        "codec": _codec(tier),
        "entries": tier.entries if held else None,
        "bytes": tier.nbytes if held else None,
        "budget": tier.budget,
        "out": tier.out,
    }


@store.command()
def keygen(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="KEYS",
            help="Directory for the keys, created if missing; the directory must not lie inside a store.",
        ),
    ],
    namespace: options.Namespace = "default",
    as_json: options.AsJSON = False,
) -> None:
    """Make a tenant's key for an encrypted store (--encrypt KEYS). Without its key, encrypted KV cannot be read any more."""
    from cacheblend_rag.store.source import make_key

    file = make_key(directory, namespace)
    if as_json:
        print_json({"file": str(file), "tenant": namespace})
    else:
        echo(f"Written to {file}. Keep a copy where the store's disk cannot take it along.")


@store.command()
def ls(
    directory: options.Store = None, namespace: options.Namespace = "default", as_json: options.AsJSON = False
) -> None:
    """List chunks with the size of their KV and when it was last used."""
    with open_inventory(directory, namespace) as inventory:
        items = inventory.items()
        _say_unlisted(inventory)
    if as_json:
        print_json([asdict(item) for item in items])
        return
    rows = [["id", "tokens", "KV", "last used", "document"]]
    for item in items:
        used = "-" if item.last_used is None else f"{datetime.fromtimestamp(item.last_used):%Y-%m-%d %H:%M}"
        rows.append([item.id, str(item.tokens or "-"), size(item.nbytes), used, item.path or "-"])
    echo(table(rows))


@store.command()
def reembed(
    *,
    directory: options.Store = None,
    namespace: options.Namespace = "default",
    embedding: options.Embedding = None,
    as_json: options.AsJSON = False,
) -> None:
    """Embed every chunk again, with --embedding by another model, such as one of `tune-retriever --part both`. KV is unchanged.

    Searches continue meanwhile, with all old or all new vectors. The previous model can be given again later.
    """
    from cacheblend_rag.retrieval.index import ChunkIndex

    with ChunkIndex(index_directory(directory, namespace)) as index, progress("Embedding") as show:
        before = index.stats().embedding
        index.rebuild(embedding, by_steps(show, index.count(), "chunks"))
        after = index.stats()
    if as_json:
        print_json({"chunks": after.chunks, "before": before, "embedding": after.embedding})
        return
    echo(f"{after.chunks:,} chunks embedded by {after.embedding}; before: {before}")


@store.command()
def verify(
    directory: options.Store = None,
    keep: Annotated[bool, typer.Option("--keep", help="Only report damaged entries; do not remove them.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Check every KV entry against its checksums; exit code 3 if not all are good. Removed KV is computed again when needed."""
    with open_inventory(directory) as inventory, status("Verifying"):
        report = inventory.store.verify(repair=not keep)
        _say_unlisted(inventory)
    if as_json:
        found = {"checked": report.checked, "damaged": report.damaged, "removed": bool(report.damaged) and not keep}
        print_json({**found, "unreadable": report.unreadable})
    else:
        done = "" if not report.damaged else " and kept" if keep else " and removed"
        echo(f"{report.checked:,} entries checked, {len(report.damaged):,} damaged{done}")
        for key in report.damaged:
            echo(key)
        if report.unreadable:
            echo(f"{len(report.unreadable):,} cannot be read now, or not by this version, and stay")
    if report.damaged or report.unreadable:
        raise typer.Exit(3)


@store.command()
def evict(
    to: Annotated[str, typer.Option("--to", help="Size to bring the KV down to: 2GiB, 500MB, 0.")],
    directory: options.Store = None,
    tier: Annotated[
        str | None,
        typer.Option(help="Evict from this tier only, named as in `store stats` (default: from every tier)."),
    ] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Remove the least recently used KV until no tier of the store is larger than a size."""
    from cacheblend_rag.store.opening import parse_size

    limit = parse_size(to)
    with open_inventory(directory) as inventory:
        freed = inventory.evict(limit, tier)
        left = inventory.store.stats()
    if as_json:
        print_json({"freed_bytes": freed, "entries": left.entries, "bytes": left.nbytes})
    else:
        echo(f"{size(freed)} freed; {left.entries:,} entries, {size(left.nbytes)} left")


@store.command()
def rm(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Chunk ids or KV keys, or their first 6 or more characters."),
    ],
    directory: options.Store = None,
    namespace: options.Namespace = "default",
    as_json: options.AsJSON = False,
) -> None:
    """Remove the KV of chunks. The chunks stay indexed; their KV is computed again when a prompt needs the KV."""
    with open_inventory(directory, namespace) as inventory:
        removed = [inventory.remove(item_id) for item_id in ids]
    if as_json:
        print_json([{"id": item.id, "freed_bytes": item.nbytes or 0} for item in removed])
        return
    for item in removed:
        echo(f"{item.id}: {'no KV was stored' if item.nbytes is None else size(item.nbytes) + ' removed'}")
