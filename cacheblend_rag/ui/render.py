"""Renders an answer's numbers and sources as HTML. All text from documents and models is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.console.output import counted, seconds

if TYPE_CHECKING:
    from cacheblend_rag.blending.outcome import ChunkOutcome, PromptOutcome
    from cacheblend_rag.engines.results import Generation
    from cacheblend_rag.retrieval.index import Hit, IndexedDocument
    from cacheblend_rag.ui.collection import FileState
    from cacheblend_rag.ui.conversation import Exchange

Updates = dict[Any, Any]
"""New values of components, by component."""

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Options of the page's event handlers: show no progress, and hide the handlers from Gradio's public API."""

_FATES = {
    "exact": "computed in just this context",
    "reused": "stored KV used as it is",
    "recomputed": "computed anew",
    "missing": "not stored yet",
    "text": "question and text between chunks",
}


_WORDS = {"done": "indexed"}
_AROUND = 240
"""Characters shown before and after a marked sentence; with two sentences, half as many around each sentence."""
_SOONER = 1.05
"""Smallest speed-up that counts as sooner; a smaller one is within the accuracy of the measurement."""


def hint(text: str) -> str:
    """Return a line that tells the user what is missing, or what to do."""
    return f'<p class="cb-hint">{escape(text)}</p>'


def error(text: str) -> str:
    """Return an error message."""
    return f'<p class="cb-error" role="alert">{escape(text)}</p>'


def status(text: str, ready: bool) -> str:
    """Return what the model is doing or, once the model is loaded, its name and how to choose another model."""
    if not ready:
        return f'<p class="cb-status" role="status"><b>{escape(text)}</b></p>'
    other = "<small>To choose another, start the page with --model.</small>"
    return f'<p class="cb-status" role="status">Model <b>{escape(text)}</b> {other}</p>'


def answer(exchange: Exchange | None) -> str:
    """Return an answer's numbers, its token bar, and its sources as cards."""
    if exchange is None:
        return hint("Ask a question, and the documents its answer rests on are shown here.")
    if not exchange.hits:
        return hint("This answer has no sources." if exchange.outcome != "answering" else "Looking for sources…")
    parts = [_passages(exchange), numbers_and_bar(exchange)]
    if exchange.outcome == "stopped" and exchange.generation is None:
        parts.append(hint("Stopped before its end, so the engine reports no numbers."))
    parts += [hint(note) for note in exchange.notes]
    done = exchange.generation
    chunks = {} if done is None else {chunk.id: chunk for chunk in done.chunks}
    cards = [_card(number, source, chunks.get(source.id)) for number, source in enumerate(exchange.hits, 1)]
    if exchange.sayings:
        parts.append(
            hint("A number in the answer names the source that shares most words with the sentence before it.")
        )
    return "".join(parts) + f'<div class="cb-cards">{"".join(cards)}</div>'


def _passages(exchange: Exchange) -> str:
    """Return the sentence nearest to the question, and the source sentence of the answer's first marked sentence."""
    found = []
    if exchange.passage is not None:
        found.append((0, *exchange.passage, "the sentence nearest to the question, whatever the model answers"))
    for said in exchange.sayings[:1]:
        if (said.text, said.start, said.end) != (0, *(exchange.passage or ())):
            found.append((said.text, said.start, said.end, "the sentence with the answer's words"))
    around = _AROUND // len(found) if found else 0
    return "".join(
        _passage(exchange.hits[number], number, start, end, around, what) for number, start, end, what in found
    )


def _passage(source: Hit, number: int, start: int, end: int, around: int, what: str) -> str:
    """Return a marked sentence of a source, with ``around`` characters on either side."""
    before, behind = source.text[max(0, start - around) : start], source.text[end : end + around]
    if start > around:
        before = f"… {before.partition(' ')[2]}"
    if end + around < len(source.text):
        behind = f"{behind.rpartition(' ')[0]} …"
    where = f"[{number + 1}] {Path(source.path).name}, {source.place}: {what}"
    return (
        f'<figure class="cb-passage"><p>{escape(before)}<mark>{escape(source.text[start:end])}</mark>'
        f"{escape(behind)}</p><figcaption>{escape(where)}</figcaption></figure>"
    )


def numbers_and_bar(exchange: Exchange) -> str:
    """Return the gain of an answer from reuse, and the fate of its prompt; an empty string before the answer's end."""
    if exchange.generation is None:
        return ""
    numbers = _numbers(exchange.generation, exchange.retrieve_s) + _legend(exchange.generation)
    return (
        f'<p class="cb-gain">{_gain(exchange.generation)}</p>{bar(exchange.generation)}'
        f'<details class="cb-more"><summary>Numbers</summary>{numbers}</details>'
    )


def _gain(done: Generation) -> str:
    """Return how much sooner the first token came than without stored KV, as far as that is known."""
    usage, took = done.usage, done.timings.ttft_s
    if done.mode == "prefill":
        return f"<b>Computed whole</b>, in {seconds(took)}: {escape(done.reason)}."
    computed = f"{usage.computed_tokens:,} of {usage.prompt_tokens:,} prompt tokens computed"
    if done.prefill_s is None:
        return f"<b>{computed}</b>; first token after {seconds(took)}. Compare measures what the whole prompt takes."
    gain = done.prefill_s / took if took else 0.0
    sooner = f"{gain:.1f}x sooner" if gain >= _SOONER else "No sooner"
    return (
        f"<b>{sooner}</b> than a prompt computed whole: first token after {seconds(took)}, not {seconds(done.prefill_s)}, at "
        f"the speed of this prompt's own passes; {computed}."
    )


def _numbers(done: Generation, retrieve_s: float) -> str:
    usage = done.usage
    chosen = f", {done.policy} {done.ratio:.0%}" if done.policy is not None and done.ratio is not None else ""
    rows = [
        ("first token", seconds(done.timings.ttft_s)),
        ("prompt", f"{usage.prompt_tokens:,} tokens"),
        ("computed", f"{usage.computed_tokens:,} tokens"),
        ("method", done.mode + chosen + ("" if done.calibrated else ", not calibrated")),
        ("search", seconds(retrieve_s)),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f'<dl class="cb-numbers">{cells}</dl>'


def bar(outcome: PromptOutcome) -> str:
    """Return a bar of the prompt's tokens by fate."""
    there = _counts(outcome)
    total = sum(there.values()) or 1
    said = ", ".join(f"{name} {count:,}" for name, count in there.items())
    pieces = "".join(
        f'<span class="cb-{name}" style="flex-grow:{count / total:.5f}" title="{name}: {count:,} tokens"></span>'
        for name, count in there.items()
    )
    return f'<div class="cb-bar" role="img" aria-label="Prompt tokens: {said}">{pieces}</div>'


def _legend(outcome: PromptOutcome) -> str:
    """Return the numbers of the bar as a list."""
    lines = "".join(
        f'<li><i class="cb-{name}"></i><b>{count:,}</b> {name} <small>{_FATES[name]}</small></li>'
        for name, count in _counts(outcome).items()
    )
    return f'<ul class="cb-legend">{lines}</ul>'


def _counts(outcome: PromptOutcome) -> dict[str, int]:
    return {name: count for name, count in outcome.tokens_by_fate.items() if count > 0}


def _card(number: int, source: Hit, chunk: ChunkOutcome | None) -> str:
    said = ""
    if chunk is not None:
        said = f'<span class="cb-tag cb-{chunk.fate}">{chunk.fate}</span>'
        said += f"<small>{chunk.tokens:,} tokens</small>"
    name = escape(Path(source.path).name)
    return (
        f'<details class="cb-card"><summary><b>{number}</b> {name} <small>{source.place}, {source.relevance}</small> '
        f'<span class="cb-fate">{said}</span></summary><div class="cb-text">{escape(source.text)}</div></details>'
    )


def comparison(rows: Sequence[tuple[str, Generation]], of: int) -> str:
    """Return the methods' answers to one question side by side; ``of`` is the number of methods."""
    if not rows:
        return hint("Answering by full recompute…")
    full = rows[0][1]
    whole_s = full.timings.ttft_s
    slowest = max(done.timings.ttft_s for _, done in rows) or 1
    lines = []
    for name, done in rows:
        same = "" if done is full else "same answer" if done.text.strip() == full.text.strip() else "another answer"
        mark = f'<span class="cb-{"same" if same == "same answer" else "other"}">{same}</span>' if same else ""
        lines.append(
            f'<section class="cb-method"><h4>{escape(name)} {mark}</h4><p class="cb-text">{escape(done.text.strip())}</p>'
            f'<div class="cb-time"><span style="width:{100 * done.timings.ttft_s / slowest:.1f}%"></span></div>'
            f"<small>first token {seconds(done.timings.ttft_s)}{_times(whole_s, done)}, {done.usage.computed_tokens:,} of "
            f"{done.usage.prompt_tokens:,} tokens computed</small>{bar(done)}</section>"
        )
    waiting = "" if len(rows) == of else hint(f"{len(rows)} of {of} methods have answered…")
    return f'<div class="cb-methods">{"".join(lines)}</div>{waiting}'


def _times(whole_s: float, done: Generation) -> str:
    gain = whole_s / done.timings.ttft_s if done.timings.ttft_s else 0.0
    return f" ({gain:.1f}x sooner)" if gain >= _SOONER else ""


def files(states: Iterable[FileState]) -> str:
    """Return the progress of each file."""
    lines = "".join(
        f'<li class="cb-{each.state}"><b>{escape(each.name)}</b> <span>{_WORDS.get(each.state, each.state)}</span> '
        f"<small>{escape(each.note)}</small></li>"
        for each in states
    )
    return f'<ul class="cb-files" aria-live="polite">{lines}</ul>' if lines else ""


def document_choices(documents: Sequence[IndexedDocument]) -> list[tuple[str, str]]:
    """Return the label and the path of each document that can be deleted."""
    return [(f"{Path(each.path).name} ({counted(each.chunks, 'chunk')})", each.path) for each in documents]


def asset(name: str) -> str:
    """Return the text of the style sheet or the script ``name``, which lies beside this file."""
    return (resources.files("cacheblend_rag.ui") / name).read_text(encoding="utf-8")
