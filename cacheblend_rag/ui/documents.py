"""Builds the part of the page that adds and deletes documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from cacheblend_rag.ui import render
from cacheblend_rag.ui.collection import Collection, FileState
from cacheblend_rag.ui.render import QUIET, Updates
from cacheblend_rag.ui.workspace import Workspace, explain


class DocumentsPanel:
    """Holds the components that add, list and delete documents, and their event handlers."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace
        self.files = gr.File(label="Add documents", file_count="multiple", height=160, elem_id="cb-upload")
        self.progress = gr.HTML(elem_id="cb-progress")
        self.documents = gr.CheckboxGroup([], label="Documents", elem_id="cb-documents")
        delete = gr.Button("Delete chosen", size="sm", elem_id="cb-delete")
        changed = [self.files, self.progress, self.documents]
        # Not "once": files dropped while other files are indexed must not be lost.
        self.files.upload(self.add, [self.files], changed, **QUIET, trigger_mode="multiple")
        delete.click(self.delete, [self.documents], changed, **QUIET)

    def shown(self, keep_chosen: bool = False) -> Updates:
        """Return the list of documents; waits until the model is loaded."""
        choices = render.document_choices(self._workspace.collection().documents())
        return {self.documents: gr.update(choices=choices) if keep_chosen else gr.update(choices=choices, value=[])}

    def add(self, files: list[str] | None) -> Iterator[Updates]:
        """Index dropped files."""
        yield {self.files: None, self.progress: render.hint("Waiting for the model…")}
        yield from self._changing(lambda collection: collection.add([Path(file) for file in files or ()]))

    def delete(self, paths: list[str]) -> Iterator[Updates]:
        """Delete the chosen documents."""
        if not paths:
            yield {self.progress: render.hint("Choose the documents to delete first.")}
            return

        def remove(collection: Collection) -> Iterator[list[FileState]]:
            collection.remove(paths)
            yield [FileState(Path(path).name, "removed") for path in paths]

        yield from self._changing(remove, keep_chosen=False)

    def _changing(self, change: Any, keep_chosen: bool = True) -> Iterator[Updates]:
        """Show the progress of a change of the documents, and then the documents."""
        try:
            for states in change(self._workspace.collection()):
                yield {self.progress: render.files(states)}
            # Documents that the user has chosen during the change stay chosen.
            yield self.shown(keep_chosen)
        except Exception as error:  # shown where the user looks
            yield {self.progress: render.error(explain(error))}
