"""Starts a real Chromium, and pages served by a scripted engine or the bundled model."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from cacheblend_rag.ui.workspace import Choices, Workspace
from tests.command_line import home  # noqa: F401
from tests.conftest import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.ui.browser import Tab

NEEDED = bool(os.environ.get("CACHEBLEND_NEEDS_BROWSER"))
if NEEDED:  # a missing package fails here instead of skipping the modules
    import gradio  # noqa: F401
    import playwright  # noqa: F401

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a file; it is closed after them, since its event loop would disturb async tests."""
    if CHROMIUM is None:
        reason = "the tests of the page need Chromium; make browser installs it"
        pytest.fail(reason) if NEEDED else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Open a page in a new window, or in the window of another tab (``beside=tab``)."""
    from tests.ui.browser import Tab

    contexts = []

    def open_it(url: str, beside: Tab | None = None, **options: Any) -> Tab:
        if beside is None:
            contexts.append(browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options}))
        context = contexts[-1] if beside is None else beside.page.context
        return Tab(context.new_page(), url)

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, Workspace]]]:
    """Serve a page until the end of the test, which fails if the page has raised an exception."""
    from cacheblend_rag.ui.launch import serve as launch

    served: list[Workspace] = []
    raised: list[str] = []  # Gradio prints tracebacks, and the browser shows only an error
    monkeypatch.setattr("traceback.print_exc", lambda *_, **__: raised.append(traceback.format_exc()))

    def serve_it(choices: Choices) -> tuple[str, Workspace]:
        url, workspace = launch(choices, free_port(), browser=False, block=False)
        served.append(workspace)
        return url, workspace

    yield serve_it
    import gradio

    for workspace in served:
        workspace.close()
    gradio.close_all()
    assert not raised, "\n".join(raised)
