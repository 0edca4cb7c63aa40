"""Serves the page on this machine."""

from __future__ import annotations

from cacheblend_rag.errors import InputError
from cacheblend_rag.ui.workspace import Choices, Workspace

_LARGEST_FILE = "512mb"


def serve(choices: Choices, port: int = 7860, browser: bool = True, block: bool = True) -> tuple[str, Workspace]:
    """Serve the page at ``127.0.0.1``; the model is loaded meanwhile.

    Returns:
        The page's address and the workspace, when the user interrupts; without ``block``, as in tests, at once: then the caller
        closes the workspace.

    Raises:
        InputError: Gradio is missing, or the port is taken.
    """
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise InputError("The page needs Gradio. Install it: pip install 'cacheblend-rag[ui]'") from error
    from cacheblend_rag.ui.page import Page, theme
    from cacheblend_rag.ui.render import asset

    workspace = Workspace(choices)
    page = Page(workspace, _examples(choices))
    page.blocks.queue(default_concurrency_limit=32, api_open=False)
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
        )
    except OSError as error:
        raise InputError(f"Port {port} cannot be used; choose another with --port. ({error})") from error
    # Behind the first request's back: importing torch would hold up the page.
    workspace.start()
    if block:
        try:
            page.blocks.block_thread()
        finally:
            workspace.close()
    return url, workspace


def _examples(choices: Choices) -> list[str]:
    """Return questions that the example documents answer, one of each of three kinds."""
    if choices.seed is None:
        return []
    from cacheblend_rag.demo.bundle import bundled_questions

    last = {question.kind: question.question for question in bundled_questions()}
    return [last[kind] for kind in ("single", "cross", "two_hop_cross") if kind in last]
