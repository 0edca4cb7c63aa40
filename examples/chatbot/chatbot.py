"""Chats over your documents, to start a chatbot of your own from: ``python examples/chatbot/chatbot.py [FILES...]``.

Without files it is over the bundled documents. ``cacheblend ui`` is the same with everything; this is what its core looks like.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from cacheblend_rag import (
    CacheBlendError,
    RagPipeline,
    SamplingParams,
    TransformersEngine,
    Turn,
    bundled_corpus,
    bundled_questions,
)

SAMPLING = SamplingParams(max_tokens=256, stop_repeating=True)
FILE_TYPES = [".txt", ".md", ".html", ".pdf"]


class Chatbot:
    """A pipeline, and what a page does with it. All that belongs to one tab comes in with each call."""

    def __init__(self, rag: RagPipeline, documents: list[Path]):
        self.rag = rag
        rag.index(documents)  # each chunk's KV is computed once, here

    def answer(self, message: str, messages: list[dict[str, Any]], turns: list[Turn]) -> Iterator[tuple[Any, ...]]:
        """Stream an answer; yields what the page shows, and the turns that the next question follows."""
        messages = [*messages, {"role": "user", "content": message}, {"role": "assistant", "content": "…"}]
        sources = ""
        text = ""
        try:
            for event in self.rag.stream(message, SAMPLING, history=turns):
                text += event.text
                messages[-1]["content"] = text or "…"
                if event.answer is not None:
                    sources = describe(event.answer.generation, event.answer.sources)
                    turns = [*turns, event.answer.turn(message)]
                yield "", messages, turns, sources
        except CacheBlendError as error:  # its message says what to do
            messages[-1]["content"] = f"**Not answered.** {error}"
            yield message, messages, turns, sources

    def add(self, files: list[str] | None) -> str:
        """Index files that were dropped, and say what became of each."""
        if not files:
            return ""
        try:
            report = self.rag.index(files)
        except CacheBlendError as error:
            return f"**Error:** {error}"
        lines = [f"- {Path(path).name}: indexed" for path in (*report.added, *report.changed)]
        lines += [f"- {Path(path).name}: indexed before" for path in report.unchanged]
        lines += [f"- {Path(skipped.path).name}: skipped, {skipped.reason}" for skipped in report.skipped]
        return "\n".join(lines)


def describe(done: Any, hits: Any) -> str:
    """Return where an answer comes from, and what its prompt took."""
    usage = done.usage
    lines = [
        f"First token after **{done.timings.ttft_s * 1000:.0f} ms**: of {usage.prompt_tokens:,} prompt tokens "
        f"{usage.reused_tokens:,} were reused, {usage.recomputed_tokens:,} recomputed, "
        f"{usage.computed_tokens - usage.recomputed_tokens:,} new.\n"
    ]
    for number, hit in enumerate(hits, 1):
        state = "missing: computed now" if hit.chunk.id in done.missing else "from stored KV"
        score = "" if hit.score is None else f", score {hit.score:.2f}"
        lines.append(
            f"<details><summary>{number}. {escape(Path(hit.path).name)}, chunk {hit.ordinal}{score}; {state}</summary>"
            f"<pre style='white-space: pre-wrap'>{escape(hit.chunk.text)}</pre></details>"
        )
    return "\n".join(lines)


def page(bot: Chatbot) -> gr.Blocks:
    """Lay out the page."""
    with gr.Blocks(title="Chatbot", analytics_enabled=False) as blocks:
        turns = gr.State([])  # one for each tab
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                chat = gr.Chatbot(label="Conversation", height="60vh", feedback_options=None)
                question = gr.Textbox(
                    label="Question", submit_btn="Ask", stop_btn=False, max_lines=4, elem_id="question", autofocus=True
                )
                with gr.Row():
                    stop = gr.Button("Stop", size="sm")
                    new = gr.Button("New conversation", size="sm")
                gr.Examples([q.question for q in bundled_questions()[:3]], question)
            with gr.Column(scale=2, min_width=320):
                sources = gr.Markdown("Sources are shown here.", elem_id="sources")
                files = gr.File(label="Add documents", file_count="multiple", file_types=FILE_TYPES, elem_id="files")
                report = gr.Markdown(elem_id="report")
        asked = question.submit(
            bot.answer, [question, chat, turns], [question, chat, turns, sources], show_progress="hidden"
        )
        stop.click(None, cancels=asked)
        new.click(lambda: ([], [], ""), None, [chat, turns, sources])
        files.upload(bot.add, files, report)
    return blocks


def serve(rag: RagPipeline, documents: list[Path], port: int = 7860, block: bool = True) -> str:
    """Serve the page on this machine; return its address."""
    blocks = page(Chatbot(rag, documents)).queue(default_concurrency_limit=8)
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # nothing from elsewhere
    _, url, _ = blocks.launch(
        server_name="127.0.0.1", server_port=port, theme=theme, footer_links=[], prevent_thread_lock=not block
    )
    return url


def main() -> None:
    store = os.environ.get("STORE") or tempfile.mkdtemp(prefix="chatbot-")
    documents = [Path(name) for name in sys.argv[1:]] or [bundled_corpus()]
    with TransformersEngine(os.environ.get("MODEL"), store=store) as engine, RagPipeline(engine, store) as rag:
        serve(rag, documents)


if __name__ == "__main__":
    main()
