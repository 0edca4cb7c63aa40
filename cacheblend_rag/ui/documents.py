"""Builds the part of the page where collections are chosen and documents are added and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.ui import render
from cacheblend_rag.ui.collections import Collection, FileState
from cacheblend_rag.ui.conversation import Tabs
from cacheblend_rag.ui.render import QUIET, Updates
from cacheblend_rag.ui.workspace import Workspace, explain


class DocumentsPanel:
    """Components and what they do; ``tab`` is the component that holds the tab's id."""

    def __init__(self, workspace: Workspace, tabs: Tabs, tab: Any):
        self._workspace, self._tabs = workspace, tabs
        self.collection = gr.Dropdown([], label="Collection", interactive=True, elem_id="cb-collection")
        self.files = gr.File(
            label="Add documents",
            file_count="multiple",
            height=160,
            elem_id="cb-upload",
        )
        self.progress = gr.HTML(elem_id="cb-progress")
        self.documents = gr.CheckboxGroup([], label="Documents", elem_id="cb-documents")
        with gr.Row():
            delete = gr.Button("Delete chosen", size="sm", min_width=110, elem_id="cb-delete")
            reindex = gr.Button("Index again", size="sm", min_width=110, elem_id="cb-reindex")
        with gr.Accordion("New collection", open=False):
            self.name = gr.Textbox(label="Name", submit_btn="Make", max_lines=1, elem_id="cb-new-collection")
        changed = [self.collection, self.files, self.progress, self.documents, self.name]
        # Not "once": a second drop while the first is indexed must not be lost.
        self.files.upload(self.add, [self.files, tab], changed, **QUIET, trigger_mode="multiple")
        for event, function, inputs in (
            (self.collection.input, self.choose, [self.collection, tab]),
            (self.name.submit, self.make, [self.name, tab]),
            (delete.click, self.delete, [self.documents, tab]),
            (reindex.click, self.reindex, [tab]),
        ):
            event(function, inputs, changed, **QUIET)

    def shown(self, tab: str) -> Updates:
        """Return the panel as the tab should see it; only once the model is loaded."""
        collections, conversation = self._workspace.collections(), self._tabs.get(tab)
        if conversation.collection not in collections.names():
            conversation.collection = collections.first.name
        return self._listed(collections.get(conversation.collection))

    def _listed(self, collection: Collection, keep_chosen: bool = False) -> Updates:
        names = self._workspace.collections().names()
        choices = render.document_choices(collection.documents())
        return {
            self.collection: gr.update(choices=names, value=collection.name),
            self.documents: gr.update(choices=choices) if keep_chosen else gr.update(choices=choices, value=[]),
        }

    def _chosen(self, tab: str) -> Collection:
        return self._workspace.collections().get(self._tabs.get(tab).collection)

    def choose(self, name: str, tab: str) -> Updates:
        """Ask another collection from now on; one that cannot be opened is not taken."""
        try:
            collection = self._workspace.collections().get(name)
        except Exception as error:
            return {self.progress: render.error(explain(error)), self.collection: self._tabs.get(tab).collection}
        self._tabs.get(tab).collection = name
        return {self.progress: "", **self._listed(collection)}

    def make(self, name: str, tab: str) -> Updates:
        """Make a collection, and ask it from now on."""
        try:
            collection = self._workspace.collections().make(name)
        except CacheBlendError as error:
            return {self.progress: render.error(str(error))}
        self._tabs.get(tab).collection = collection.name
        return {self.progress: "", self.name: "", **self._listed(collection)}

    def add(self, files: list[str] | None, tab: str) -> Iterator[Updates]:
        """Index files that were dropped."""
        yield {self.files: None, self.progress: render.hint("Waiting for the model…")}
        yield from self._changing(tab, lambda collection: collection.add([Path(file) for file in files or ()]))

    def reindex(self, tab: str) -> Iterator[Updates]:
        """Index what has changed on disk."""
        yield from self._changing(tab, Collection.reindex)

    def delete(self, paths: list[str], tab: str) -> Iterator[Updates]:
        """Delete the chosen documents."""
        if not paths:
            yield {self.progress: render.hint("Choose the documents to delete first.")}
            return

        def remove(collection: Collection) -> Iterator[list[FileState]]:
            collection.remove(paths)
            yield [FileState(Path(path).name, "removed") for path in paths]

        yield from self._changing(tab, remove, keep_chosen=False)

    def _changing(self, tab: str, change: Any, keep_chosen: bool = True) -> Iterator[Updates]:
        """Show how far a change of the tab's collection is, and what is indexed behind it."""
        try:
            collection = self._chosen(tab)
            for states in change(collection):
                yield {self.progress: render.files(states)}
            # What the person has chosen while the change went on stays chosen.
            yield self._listed(collection, keep_chosen)
        except Exception as error:  # said where the person looks
            yield {self.progress: render.error(explain(error))}
