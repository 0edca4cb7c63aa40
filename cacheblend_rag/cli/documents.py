"""Runs `cacheblend documents`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import index_directory, open_inventory
from cacheblend_rag.console.output import echo, print_json, size, table
from cacheblend_rag.printable import in_one_line

if TYPE_CHECKING:
    from pathlib import Path

    from cacheblend_rag.retrieval.index import IndexedDocument


class _ListingGroup(TyperGroup):
    """Runs `documents ls` if no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if not named and not ctx.resilient_parsing:  # shell completion names the command later
            args = ["ls", *args]
        return super().parse_args(ctx, args)


documents = typer.Typer(
    cls=_ListingGroup,
    add_completion=False,
    help="List the documents of an index (as `documents ls` does), or remove some. No model is loaded.",
)


@documents.command()
def ls(
    directory: options.Store = None, namespace: options.Namespace = "default", as_json: options.AsJSON = False
) -> None:
    """List the indexed documents, with the number of their chunks."""
    found = _indexed(directory, namespace)
    if as_json:
        print_json([asdict(each) for each in found])
    elif found:
        echo(table([["document", "chunks"], *([each.path, f"{each.chunks:,}"] for each in found)]))
    else:
        echo("Nothing is indexed here.", err=True)


def _indexed(directory: Path | None, namespace: str) -> list[IndexedDocument]:
    from cacheblend_rag.retrieval.index import ChunkIndex

    home = index_directory(directory, namespace)
    if ChunkIndex.exists(home):  # without the KV store, which takes seconds to import
        with ChunkIndex(home) as index:
            return index.documents()
    with open_inventory(directory, namespace) as inventory:
        return inventory.documents()


@documents.command()
def rm(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Documents as `documents ls` names them, directories, or file names."),
    ],
    directory: options.Store = None,
    namespace: options.Namespace = "default",
    as_json: options.AsJSON = False,
) -> None:
    """Remove documents from the index, and from the store the KV of chunks that no other document contains.

    The files themselves stay; `cacheblend index` with the files, or their directory, indexes them again.
    """
    with open_inventory(directory, namespace) as inventory:
        # All names are looked up before a document is removed, so that a mistyped name changes nothing.
        wanted = dict.fromkeys(path for name in paths for path in inventory.find_documents(name))
        removed = inventory.remove_documents(wanted)
    if as_json:
        print_json([asdict(each) for each in removed])
        return
    for each in removed:
        kept = each.chunks - each.removed
        note = f"; {kept:,} of its {each.chunks:,} chunks stand in other documents, too, and stay" if kept else ""
        echo(f"{in_one_line(each.path)} removed, with {size(each.nbytes)} of KV{note}")
