"""Serves the page on this machine."""

from __future__ import annotations

import os
from functools import cache
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from cacheblend_rag.errors import InputError
from cacheblend_rag.ui.workspace import Choices, Workspace

_LARGEST_FILE = "512mb"


def serve(choices: Choices, port: int = 7860, browser: bool = True, block: bool = True) -> tuple[str, Workspace]:
    """Serve the page at ``127.0.0.1`` while the model loads.

    Returns:
        Without ``block``, as in tests, the page's address and the workspace, which the caller closes.

    Raises:
        InputError: Gradio is missing, or the port is taken.
        KeyboardInterrupt: The user has stopped the page.
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise InputError("The page needs Gradio. Install it: pip install 'cacheblend-rag[ui]'") from error
    from starlette.middleware import Middleware

    from cacheblend_rag.ui.guard import Guard
    from cacheblend_rag.ui.page import Page, theme
    from cacheblend_rag.ui.render import asset

    os.environ["GRADIO_TEMP_DIR"] = _uploads().name
    workspace = Workspace(choices)
    page = Page(workspace, _examples(choices))
    page.blocks.queue(default_concurrency_limit=32, api_open=False)
    _look_seldom(page.blocks._queue)
    try:
        _, url, _ = page.blocks.launch(
            server_name="127.0.0.1",
            server_port=port,
            prevent_thread_lock=True,
            inbrowser=browser,
            quiet=True,
            share=False,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            mcp_server=False,
            ssr_mode=False,
            max_file_size=_LARGEST_FILE,
            theme=theme(),
            css=asset("style.css"),
            head=f"<script>{asset('keys.js')}</script>",
            app_kwargs={"middleware": [Middleware(Guard)]},
        )
    except OSError as error:
        raise InputError(f"Port {port} cannot be used; choose another with --port. ({error})") from error
    # The model loads after the page is served: importing torch would delay the page.
    workspace.start()
    if block:
        try:
            Event().wait()  # Gradio's own wait does not raise KeyboardInterrupt on Ctrl-C
        finally:
            page.blocks.close(verbose=False)
            workspace.close()
    return url, workspace


def _look_seldom(queue: Any) -> None:
    """Make Gradio's queue poll as often as on Windows; on other systems it polls a thousand times a second.

    Polling a thousand times a second takes 4% of a core while nobody asks anything.
    """
    queue.sleep_when_free, queue.progress_update_sleep_when_free = 0.05, 0.1


@cache
def _uploads() -> TemporaryDirectory[str]:
    """Return Gradio's upload directory, which only this user can read, and which is deleted with the process.

    Gradio's default is one directory for all users of the machine, which all users can read.
    """
    return TemporaryDirectory(prefix="cacheblend-ui-")


def _examples(choices: Choices) -> list[str]:
    """Return one question of each of three kinds that the example documents answer."""
    if choices.seed is None:
        return []
    from cacheblend_rag.demo.bundle import bundled_questions

    last = {question.kind: question.question for question in bundled_questions()}
    return [last[kind] for kind in ("single", "cross", "two_hop_cross") if kind in last]
