"""Builds the part of the page where users ask questions and read answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import gradio as gr

from cacheblend_rag.blending.settings import BlendSettings, Quality
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.ui.answers import AnswerPanel
from cacheblend_rag.ui.conversation import Conversation, Tabs
from cacheblend_rag.ui.render import QUIET, Updates
from cacheblend_rag.ui.workspace import Workspace, explain

_QUALITIES = [
    ("as started", ""),
    ("high: recompute what matters", "high"),
    ("fast: recompute less", "fast"),
    ("exact: the answer of no reuse", "exact"),
]
_ASKING = {"submit_btn": False, "stop_btn": "Stop"}
_IDLE = {"submit_btn": "Ask", "stop_btn": False, "interactive": True}


class ChatPanel:
    """Holds the components of the conversation and their event handlers; ``tab`` is the component with the tab's id."""

    def __init__(self, workspace: Workspace, tabs: Tabs, tab: Any, examples: list[str]):
        """Lay the panel out in the caller's layout; :meth:`connect` does the rest."""
        self._workspace, self._tabs, self._tab = workspace, tabs, tab
        self.chatbot = gr.Chatbot(
            label="Conversation",
            show_label=False,
            height="62vh",
            buttons=["copy"],
            feedback_options=None,
            latex_delimiters=[],
            group_consecutive_messages=False,
            placeholder="Ask something about your documents.",
            examples=[{"text": question} for question in examples] or None,
            elem_id="cb-chat",
        )
        self.question = gr.Textbox(
            show_label=False,
            label="Question",
            placeholder="Ask a question",
            max_lines=5,
            interactive=False,  # until the tab has its id, which names the conversation
            elem_id="cb-question",
            submit_btn="Ask",
        )
        with gr.Row(elem_id="cb-below"):
            self.quality = gr.Dropdown(
                _QUALITIES, value="", label="Reuse of stored KV", min_width=240, interactive=True, elem_id="cb-quality"
            )
            self.new = gr.Button("New conversation", size="sm", min_width=160, elem_id="cb-new")

    def connect(self, answers: AnswerPanel) -> None:
        """Connect the event handlers of the panel, which also change the panel of ``answers``."""
        self._answers = answers
        self.changed = [self.chatbot, self.question, *answers.changed]
        for event, function, inputs in (
            (self.question.submit, self.ask, [self.question, self._tab, self.quality]),
            (self.chatbot.example_select, self.example, [self._tab, self.quality]),
            (self.question.stop, self.stop, [self._tab]),
            (self.new.click, self.clear, [self._tab]),
            (self.chatbot.clear, self.clear, [self._tab]),
        ):
            # By default, Gradio drops a question while another runs, and a stopped question runs on to its next token.
            event(function, inputs, self.changed, **QUIET, trigger_mode="multiple")
        self.chatbot.select(self.pick, [self._tab], answers.changed, **QUIET)

    def view(self, conversation: Conversation) -> Updates:
        """Return the state of this panel and of the answer panel while nothing is being answered."""
        return {
            self.chatbot: messages(conversation),
            self.question: gr.update(**_IDLE, autofocus=True),
            **self._answers.view(conversation),
        }

    def ask(self, question: str, tab: str, quality: Quality | Literal[""] = "") -> Iterator[Updates]:
        """Answer a question piece by piece; without a ``quality``, use the settings with which the page was started."""
        conversation = self._tabs.get(tab)
        if not question.strip():
            yield {self.question: gr.update(placeholder="Write a question first.")}
            return
        settings = BlendSettings(quality=quality) if quality else self._workspace.choices.settings
        exchange = conversation.begin(question, settings)
        if exchange is None:  # Enter was pressed twice; sending nothing would empty the page
            yield {self.question: gr.update(value="")}
            return
        waiting = [*messages(conversation)[:-1], _message("assistant", "Waiting for the model…")]
        yield {self.question: gr.update(value="", **_ASKING), self.chatbot: waiting}
        try:
            collection = self._workspace.collection()
        except CacheBlendError as error:
            exchange.outcome, exchange.text = "failed", explain(error)
            yield self.view(conversation)
            return
        shown = 0
        for _ in conversation.answer(exchange, collection, self._workspace.choices):
            running = conversation.current
            if running is not None and running is not exchange:
                # The answer was stopped, and another question is running. Gradio sends the last update again at the
                # end.
                yield {self.chatbot: gr.skip()}
                return
            updates: Updates = {self.chatbot: messages(conversation)}
            if len(exchange.hits) != shown:  # the sources come before the answer
                shown = len(exchange.hits)
                updates |= self._answers.view(conversation)
            yield updates
        yield self.view(conversation)

    def example(self, tab: str, quality: Quality | Literal[""], chosen: gr.SelectData) -> Iterator[Updates]:
        """Ask one of the example questions."""
        yield from self.ask(chosen.value["text"], tab, quality)

    def stop(self, tab: str) -> Updates:
        """Stop the answer that is being written."""
        conversation = self._tabs.get(tab)
        conversation.stop()
        return self.view(conversation)

    def clear(self, tab: str) -> Updates:
        """Start a new conversation."""
        conversation = self._tabs.get(tab)
        conversation.stop()
        conversation.exchanges.clear()
        return self.view(conversation)

    def pick(self, tab: str, chosen: gr.SelectData) -> Updates:
        """Show the sources of the chosen answer."""
        index = chosen.index[0] if isinstance(chosen.index, (list, tuple)) else chosen.index
        conversation = self._tabs.get(tab)
        return self._answers.view(conversation, min(index // 2, len(conversation.exchanges) - 1))


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation in Gradio's form: two messages for each question."""
    found = []
    for each in conversation.exchanges:
        text = each.marked or each.text.strip()
        if each.outcome == "failed":
            text = f"**Not answered.** {text}"
        elif each.outcome == "stopped":
            text = f"{text} *(stopped)*".strip()
        found += [
            _message("user", each.question),
            _message("assistant", text or ("…" if each.outcome == "answering" else "(no answer)")),
        ]
    return found


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
