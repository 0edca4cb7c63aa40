"""Lays out the page: documents at the side, the conversation in the middle, the answers' sources beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.ui import render
from cacheblend_rag.ui.answers import AnswerPanel
from cacheblend_rag.ui.chat import ChatPanel
from cacheblend_rag.ui.conversation import Tabs
from cacheblend_rag.ui.documents import DocumentsPanel
from cacheblend_rag.ui.render import QUIET, Updates, asset
from cacheblend_rag.ui.workspace import Workspace

_POLL_S = 0.2
# Seconds between Gradio's clean-ups, and age at which Gradio deletes its copies of uploads; the store has its own
# copies.
_KEPT_S = (3600, 3600)


class Page:
    """Lays out one page for all tabs; a tab shows its own conversation."""

    def __init__(self, workspace: Workspace, examples: list[str]):
        """Lay the page out without waiting for the model."""
        self._workspace, self._tabs = workspace, Tabs()
        with gr.Blocks(
            title="CacheBlend", analytics_enabled=False, fill_width=True, delete_cache=_KEPT_S
        ) as self.blocks:
            tab = gr.Textbox(visible="hidden", label="tab", elem_id="cb-tab")
            wide = gr.Checkbox(visible="hidden", label="wide", elem_id="cb-wide")
            # Closed until the window is known to be wide: on a phone, the sidebar would cover the conversation.
            with gr.Sidebar(open=False, width=320, elem_id="cb-side") as self._side:
                documents = DocumentsPanel(workspace)
            with gr.Row(elem_id="cb-head"):
                self._status = gr.HTML(_status(workspace), elem_id="cb-status")
                self._retry = gr.Button("Try again", visible=False, size="sm", scale=0, elem_id="cb-try-again")
            with gr.Row(elem_id="cb-main"):
                with gr.Column(scale=3, min_width=320):
                    self._chat = ChatPanel(workspace, self._tabs, tab, examples)
                with gr.Column(scale=2, min_width=320, elem_id="cb-panel"):
                    answers = AnswerPanel(workspace, self._tabs, tab)
            self._chat.connect(answers)
            self._documents = documents
            changed = [tab, self._side, self._status, self._retry, documents.documents, *self._chat.changed]
            self._tab = tab
            self.blocks.load(self.begin, [tab, wide], changed, js=asset("tab.js"), **QUIET)
            self._retry.click(self.try_again, None, changed, **QUIET)

    async def begin(self, tab: str, wide: bool) -> AsyncIterator[Updates]:
        """Show a tab's conversation, and the state of the model until the model is loaded."""
        conversation = self._tabs.get(tab)
        conversation.stop()  # a reloaded tab does not continue the answer that was being written
        yield {self._tab: tab, self._side: gr.update(open=wide), **self._chat.view(conversation)}
        async for updates in self._wait():
            yield updates

    async def try_again(self) -> AsyncIterator[Updates]:
        """Load the model again."""
        self._workspace.start()
        async for updates in self._wait():
            yield updates

    async def _wait(self) -> AsyncIterator[Updates]:
        said = ""
        while not (self._workspace.ready or self._workspace.failed):
            if said != self._workspace.status:
                said = self._workspace.status
                yield self._told()
            await asyncio.sleep(_POLL_S)
        yield self._told()
        if self._workspace.ready:
            try:
                yield await asyncio.to_thread(self._documents.shown)
            except CacheBlendError as error:
                yield {self._status: render.error(str(error))}

    def _told(self) -> Updates:
        return {self._status: _status(self._workspace), self._retry: gr.update(visible=self._workspace.failed)}


def _status(workspace: Workspace) -> str:
    if workspace.failed:
        return render.error(workspace.status)
    return render.status(workspace.status, workspace.ready)


def theme() -> Any:
    """Return the page's theme, with the system's own fonts, so that no font is fetched from elsewhere."""
    plain = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    return gr.themes.Default(
        primary_hue="blue", neutral_hue="slate", font=plain, font_mono=["ui-monospace", "Consolas", "monospace"]
    )
