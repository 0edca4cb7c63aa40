"""Formats an answer's sources and KV reuse for people, and the details that `--explain` shows."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from cacheblend_rag.console.output import counted, seconds, size, table
from cacheblend_rag.printable import in_one_line
from cacheblend_rag.retrieval.passages import sentences, words

if TYPE_CHECKING:
    from cacheblend_rag.blending.outcome import ChunkLoad, ChunkOutcome
    from cacheblend_rag.engines.results import Generation
    from cacheblend_rag.rag.results import RagAnswer
    from cacheblend_rag.retrieval.index import Hit

_WIDTH = 100
_AROUND = 160  # characters shown on either side of a marked sentence


def source_lines(answer: RagAnswer, question: str) -> list[str]:
    """Return a line for each source, with its score and a snippet about the question, and the pipeline's notes."""
    about = f"{question} {answer.answer}"
    found = [
        f"[{number}] {cite(s)} ({s.relevance}): {snippet(s.text, about)}" for number, s in enumerate(answer.sources, 1)
    ]
    return [*found, *(f"note: {note}" for note in answer.notes)]


def marked_lines(source: Hit, sentence: tuple[int, int]) -> list[str]:
    """Return a heading, and lines with the marked sentence of an answer's first source and the text around the sentence."""
    begin, end = sentence
    before, after = " ".join(source.text[:begin].split()), " ".join(source.text[end:].split())
    if len(before) > _AROUND:
        before = f"… {before[-_AROUND:].partition(' ')[2]}"
    if len(after) > _AROUND:
        after = f"{after[:_AROUND].rpartition(' ')[0]} …"
    parts = (before, f">> {' '.join(source.text[begin:end].split())} <<", after)
    shown = wrap(" ".join(filter(None, parts)), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [f"Nearest to the question, in [1] {cite(source)}:", *shown]


def cite(source: Hit) -> str:
    """Return the file name of a source's document, and the source's pages, if any."""
    return ", ".join(filter(None, (in_one_line(Path(source.path).name), source.pages)))


def snippet(text: str, about: str, width: int = _WIDTH) -> str:
    """Return the part of ``text``, at most ``width`` characters, that shares most words with ``about``.

    The part is quoted unchanged, except that white space is collapsed to make one line.
    """
    wanted, text = words(about), text.strip()
    found = list(sentences(text)) or [(0, 0)]
    best, _ = max(found, key=lambda span: len(wanted & words(text[span[0] : span[1]])))
    shown = " ".join(text[best:].split())
    if len(shown) > width:
        shown = shown[: width - 1].rsplit(" ", 1)[0] + "…"
    return f"“{'… ' if best else ''}{shown}”"


def _chosen(generation: Generation) -> str:
    """Return how the recomputed tokens were chosen; empty if the engine does not report it."""
    if generation.policy is None or generation.ratio is None:
        return ""
    return f" ({generation.policy}, {generation.ratio:.0%})"


def reuse_line(answer: RagAnswer) -> str:
    """Return how the prompt was processed, and the time to first token."""
    generation = answer.generation
    usage, ttft = generation.usage, seconds(generation.timings.ttft_s)
    if generation.mode == "blend":
        line = (
            f"blend: {usage.reused_tokens:,} tokens reused, {usage.recomputed_tokens:,} recomputed{_chosen(generation)}, "
            f"{usage.computed_tokens - usage.recomputed_tokens:,} new; first token {ttft}"
            + ("" if generation.calibrated else "; not calibrated")
        )
    else:
        line = f"prefill ({generation.reason}): {usage.computed_tokens:,} tokens computed; first token {ttft}"
    lacked = sum(not {"kv", "static"}.isdisjoint(chunk.lacks) for chunk in generation.chunks)
    return f"{line}; {counted(lacked, 'chunk')} not ready before: the next answer may differ" if lacked else line


def explain_lines(answer: RagAnswer) -> list[str]:
    """Return where each chunk's KV came from, how long the prompt waited for stored KV, and the reason."""
    generation = answer.generation
    documents = {source.id: Path(source.path).name for source in answer.sources}
    rows = [["chunk", "document", "KV from", "read", "reading took"]]
    if generation.header is not None:
        rows.append(["(header)", "-", *_load_cells(generation.header)])
    for chunk in generation.chunks:
        cells = [_without_load(chunk), "-", "-"] if chunk.load is None else _load_cells(chunk.load)
        rows.append([chunk.id[:12], documents.get(chunk.id, "-"), *cells])
    lines = [table(rows), "", f"waited for stored KV: {seconds(generation.load_s)}"]
    lines.append(f"why: {generation.reason}")
    if generation.ratio is not None:
        lines.append(f"recomputed: {generation.ratio:.0%} of the candidates, chosen by {generation.policy}")
    if generation.prefill_s is not None:
        lines.append(f"a full prefill would have taken {seconds(generation.prefill_s)} at the speed of this prompt")
    elif generation.mode == "blend":
        lines.append("what a full prefill takes is not known here; `cacheblend store calibrate` measures it")
    return lines


def _load_cells(load: ChunkLoad) -> list[str]:
    return [load.tier, size(load.nbytes), seconds(load.seconds) if load.seconds else "-"]


def _without_load(chunk: ChunkOutcome) -> str:
    """Return where the KV of a chunk came from whose stored KV was not read."""
    if chunk.fate in ("exact", "reused"):
        return "prefix cache"
    if "kv" in chunk.lacks:
        return "none, computed"
    return "computed, the first time that it comes first" if chunk.lacks else "computed"
