"""Shows the sources of an answer, the methods compared, and why tokens were recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from cacheblend_rag.errors import InputError
from cacheblend_rag.ui import render
from cacheblend_rag.ui.conversation import Conversation, Exchange, Tabs
from cacheblend_rag.ui.render import QUIET, Updates
from cacheblend_rag.ui.workspace import Workspace, explain


class AnswerPanel:
    """Holds the components for one answer and their event handlers; ``tab`` is the component with the tab's id."""

    def __init__(self, workspace: Workspace, tabs: Tabs, tab: Any):
        self._workspace, self._tabs = workspace, tabs
        self.picker = gr.Dropdown([], label="Answer", interactive=True, visible=False, elem_id="cb-picker")
        with gr.Tabs():
            with gr.Tab("Sources"):
                self.sources = gr.HTML(render.answer(None), elem_id="cb-sources")
            with gr.Tab("Compare"):
                gr.HTML(
                    render.hint("The same prompt by four methods. What counts is the quality of the first one, sooner.")
                )
                compare = gr.Button("Compare", variant="primary", elem_id="cb-compare")
                self.compared = gr.HTML(elem_id="cb-compared")
            with gr.Tab("Why"):
                gr.HTML(
                    render.hint(
                        "Which tokens of the sources depend on what stands before them, and which were recomputed: the prompt "
                        "is computed whole and blended once more."
                    )
                )
                why = gr.Button("Show", variant="primary", elem_id="cb-why")
                self.reasons = gr.HTML(elem_id="cb-reasons")
        self.changed = [self.picker, self.sources, self.compared, self.reasons]
        self.picker.input(self.pick, [self.picker, tab], self.changed, **QUIET)
        compare.click(self.compare, [self.picker, tab], [self.compared], **{**QUIET, "show_progress": "minimal"})
        why.click(self.why, [self.picker, tab], [self.reasons], **{**QUIET, "show_progress": "minimal"})

    def view(self, conversation: Conversation, number: int | None = None) -> Updates:
        """Return the panel for one answer, by default the last answer."""
        exchanges = conversation.exchanges
        number = len(exchanges) - 1 if number is None else number
        choices = [(f"{n + 1}. {each.question}", n) for n, each in enumerate(exchanges)]
        return {
            self.picker: gr.update(choices=choices, value=number if exchanges else None, visible=len(exchanges) > 1),
            self.sources: render.answer(exchanges[number] if exchanges else None),
            self.compared: "",
            self.reasons: "",
        }

    def pick(self, number: int, tab: str) -> Updates:
        """Show another answer of the conversation."""
        return self.view(self._tabs.get(tab), number)

    def _exchange(self, number: int | None, tab: str) -> Exchange:
        exchanges = self._tabs.get(tab).exchanges
        found = exchanges[number] if number is not None and number < len(exchanges) else None
        if found is None or found.prompt is None or found.outcome == "answering":
            raise InputError("Ask a question first; when it is answered, come back here.")
        return found

    def compare(self, number: int | None, tab: str) -> Iterator[str]:
        """Answer the prompt of the shown answer by every method, one after another."""
        from cacheblend_rag.demo.methods import METHODS, answer_by_each_method

        try:
            exchange = self._exchange(number, tab)
            engine, prompt = exchange.engine, exchange.prompt
            assert engine is not None
            assert prompt is not None
            rows: list[Any] = []
            yield render.comparison(rows, len(METHODS))
            for name, done in answer_by_each_method(engine, prompt, self._workspace.choices.sampling):
                rows.append((name, done))
                yield render.comparison(rows, len(METHODS))
        except Exception as error:  # shown where the user looks
            yield render.error(explain(error))

    def why(self, number: int | None, tab: str) -> str:
        """Return the chunks of the shown answer's prompt, with coloured tokens."""
        try:
            exchange = self._exchange(number, tab)
            choices, done = self._workspace.choices, exchange.generation
            chunks = () if done is None else done.chunks
            return choices.why(exchange.engine, exchange.prompt, exchange.settings, exchange.hits, chunks)
        except Exception as error:
            return render.error(explain(error))
