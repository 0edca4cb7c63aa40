"""Runs `cacheblend ui`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.engines import left_to_bundled, open_any_engine, warn_of_bundled_model
from cacheblend_rag.console.groups import CONVERSATION, QuestionOptions, takes_groups
from cacheblend_rag.demo.bundle import demo_store_name

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine


@takes_groups
def ui(
    *,
    how: QuestionOptions = CONVERSATION,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page, on this machine alone.")] = 7860,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in the browser.")] = False,
) -> None:
    """Ask your documents in the browser, and see where each answer comes from. Without options: on bundled example documents."""
    from cacheblend_rag.demo.bundle import bundled_corpus
    from cacheblend_rag.ui.launch import serve
    from cacheblend_rag.ui.workspace import Choices

    bundled = how.store is None and how.model.model is None and how.model.server is None
    default = options.store_directory(None)

    def first() -> Path:
        return default.parent / demo_store_name(how.model.device) if bundled else options.store_directory(how.store)

    def load(directory: Path) -> BlendEngine:
        return open_any_engine(how.model, directory, how.budgets)

    chosen = Choices(
        load_engine=load,
        first=first,
        home=default.parent / "collections",
        seed=bundled_corpus() if bundled else None,
        k=how.k,
        sampling=how.sampling.params(),
        settings=how.blend.settings(),
    )
    if how.store is not None and left_to_bundled(how.model):
        warn_of_bundled_model()
    typer.echo(f"Opening http://127.0.0.1:{port} (Ctrl-C ends it)", err=True)
    serve(chosen, port, browser=not no_browser)
