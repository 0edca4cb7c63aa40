"""Runs `cacheblend ui`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.console.engines import open_any_engine, store_directory, with_model
from cacheblend_rag.console.groups import CONVERSATION, QuestionOptions, takes_groups
from cacheblend_rag.console.output import echo
from cacheblend_rag.demo.bundle import demo_store_name
from cacheblend_rag.engines.models import BUNDLED_MODEL

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine


@takes_groups
def ui(
    *,
    how: QuestionOptions = CONVERSATION,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the page; only this machine can reach the page.")
    ] = 7860,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in the browser.")] = False,
) -> None:
    """Ask questions about your documents in the browser, and see the sources. --model bundled uses example documents."""
    from cacheblend_rag.demo.bundle import bundled_corpus
    from cacheblend_rag.ui.launch import serve
    from cacheblend_rag.ui.workspace import Choices

    example = how.store is None and how.model.model == BUNDLED_MODEL and how.model.server is None

    def store() -> Path:
        own = store_directory(how.store)
        return own.parent / demo_store_name(how.model.device) if example else own

    def why(*given: Any) -> str:
        from cacheblend_rag.calibrate.why import shown_deviations

        return shown_deviations(*given)

    def load(directory: Path) -> BlendEngine:
        return open_any_engine(with_model(how.model, directory), directory, how.budgets)

    chosen = Choices(
        load_engine=load,
        store=store,
        why=why,
        seed=bundled_corpus() if example else None,
        k=how.k,
        sampling=how.sampling.params(),
        settings=how.blend.settings(),
    )
    echo(f"{'The page is at' if no_browser else 'Opening'} http://127.0.0.1:{port} (Ctrl-C ends it)", err=True)
    serve(chosen, port, browser=not no_browser)
