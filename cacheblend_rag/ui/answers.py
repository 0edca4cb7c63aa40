"""Shows what an answer rests on: its sources, the methods compared, and why."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from cacheblend_rag.blending.policies import POLICIES
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.errors import InputError
from cacheblend_rag.ui import render
from cacheblend_rag.ui.conversation import Conversation, Exchange, Tabs
from cacheblend_rag.ui.render import QUIET, Updates
from cacheblend_rag.ui.workspace import Workspace, explain

_PROFILES = "the model's own"
_STORED, _MEASURED = "ranked at indexing", "measured in this prompt"


class AnswerPanel:
    """Components and what they do; ``tab`` is the component that holds the tab's id."""

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
                why, inputs = self._lay_out_why()
                self.reasons = gr.HTML(elem_id="cb-reasons")
        self.changed = [self.picker, self.sources, self.compared, self.reasons]
        self.picker.input(self.pick, [self.picker, tab], self.changed, **QUIET)
        compare.click(self.compare, [self.picker, tab], [self.compared], **{**QUIET, "show_progress": "minimal"})
        why.click(self.why, [*inputs, self.picker, tab], [self.reasons], **{**QUIET, "show_progress": "minimal"})

    def _lay_out_why(self) -> tuple[Any, list[Any]]:
        """Lay out the controls; return the button, and what it takes."""
        gr.HTML(
            render.hint("Which tokens of the sources depend on what stands before them, and which were recomputed.")
        )
        with gr.Row():
            policy = gr.Dropdown(
                [_PROFILES, *POLICIES], value=_PROFILES, label="Policy", min_width=240, elem_id="cb-policy"
            )
            own = gr.Checkbox(True, label="Model's own ratio", min_width=140, elem_id="cb-own-ratio")
            ratio = gr.Slider(
                0, 1, 0.5, step=0.01, label="Recompute ratio", min_width=140, visible=False, elem_id="cb-ratio"
            )
        shown = gr.Radio([_STORED, _MEASURED], value=_STORED, label="KV deviation", elem_id="cb-deviation")
        own.change(lambda mine: gr.update(visible=not mine), own, ratio, **QUIET)
        button = gr.Button("Answer again and show", variant="primary", elem_id="cb-why")
        return button, [policy, own, ratio, shown]

    def view(self, conversation: Conversation, number: int | None = None) -> Updates:
        """Return the panel for one answer, by default the last."""
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
        """Answer the shown answer's prompt by every method, one after another."""
        from cacheblend_rag.demo.methods import METHODS, answer_by_each_method
        from cacheblend_rag.rag.fates import prompt_fate

        try:
            exchange = self._exchange(number, tab)
            engine, prompt = exchange.engine, exchange.prompt
            assert engine is not None
            assert prompt is not None
            rows: list[Any] = []
            yield render.comparison(rows, len(METHODS))
            for name, done in answer_by_each_method(engine, prompt, self._workspace.choices.sampling):
                rows.append((name, done, prompt_fate(engine, prompt, done, METHODS[name])))
                yield render.comparison(rows, len(METHODS))
        except Exception as error:  # said where the person looks
            yield render.error(explain(error))

    def why(self, policy: str, own: bool, ratio: float, shown: str, number: int | None, tab: str) -> Iterator[str]:
        """Answer the shown answer's prompt again with other blend options, and colour its chunks."""
        from cacheblend_rag.ui.why import answer_again, coloured, measured_deviations, stored_deviations

        try:
            exchange = self._exchange(number, tab)
            settings = BlendSettings(None if own else ratio, None if policy == _PROFILES else policy)
            again = answer_again(exchange, self._workspace.choices.sampling, settings)
            head = f'<p class="cb-again">{escape(again.text.strip())}</p>{render.numbers_and_bar(again)}'
            yield head + render.hint("Colouring…")
            deviations = measured_deviations(again, settings) if shown == _MEASURED else stored_deviations(again)
            yield head + coloured(again, deviations)
        except Exception as error:
            yield render.error(explain(error))
