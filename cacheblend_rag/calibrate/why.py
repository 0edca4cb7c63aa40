"""Shows a prompt's chunks, coloured by KV deviation, with the recomputed tokens marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.inspection import PromptInspector
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.rag.fates import ChunkFate
from cacheblend_rag.retrieval.index import Hit


@dataclass(frozen=True)
class Deviations:
    """Holds, by position, the relative deviation of stored KV from the prompt's full prefill, and the recomputed positions."""

    of: dict[int, float]
    recomputed: frozenset[int]


def measured_deviations(engine: BlendEngine, prompt: TokenizedPrompt, settings: BlendSettings) -> Deviations:
    """Measure the KV deviation in this prompt against a full prefill, and blend the prompt again to see the recomputed tokens.

    Layers differ in scale, so that each layer is divided by its mean; a token's deviation is the mean over layers.

    Raises:
        InputError: The engine does not show its KV.
        ModelError: The model is not blended, or no KV of the prompt is stale.
    """
    if not isinstance(engine, TransformersEngine):
        raise InputError(
            "Only the transformers engine can measure KV deviation in a prompt: leave --engine and --server out."
        )
    inspector = PromptInspector(engine, prompt)
    layers = inspector.measure_deviation()[1:]  # KV of layer 0 depends on the token alone
    mean = (layers / layers.mean(1, keepdim=True).clamp_min(1e-30)).mean(0)
    reuse = engine.profile.resolve(settings, engine.num_layers).reuse
    chosen = inspector.recomputed(settings).tolist() if reuse == "chunks" else ()
    return Deviations(dict(zip(inspector.stale.tolist(), mean.tolist(), strict=True)), frozenset(chosen))


def shown_deviations(
    engine: BlendEngine,
    prompt: TokenizedPrompt,
    settings: BlendSettings,
    hits: Iterable[Hit],
    chunk_fates: Iterable[ChunkFate] = (),
) -> str:
    """Return the prompt's chunks as HTML: five shades by deviation, recomputed tokens underlined.

    Raises the errors of :func:`measured_deviations`.
    """
    deviations = measured_deviations(engine, prompt, settings)
    shades = _shades(deviations.of)
    fates = {fate.id: fate.fate for fate in chunk_fates}
    sources = {source.id: (number, source) for number, source in enumerate(hits, 1)}
    parts = [_legend(len(deviations.recomputed))]
    for span in prompt.spans:
        (number, source), fate = sources[span.chunk.id], fates.get(span.chunk.id, "")
        note = "exact: nothing of it deviates" if fate == "exact" else fate
        text = "".join(_runs(engine, span, {} if fate == "exact" else shades, deviations.recomputed))
        parts.append(
            f'<details class="cb-card"{"" if fate == "exact" else " open"}><summary><b>{number}</b> '
            f"{escape(Path(source.path).name)} <small>{source.place}; {note}</small></summary>"
            f'<div class="cb-text cb-tokens">{text}</div></details>'
        )
    return "".join(parts)


def _shades(deviations: dict[int, float]) -> dict[int, int]:
    """Return each position's shade, 0 to 4: the lower half of all tokens has shade 0, and the highest 2% have shade 4."""
    if not deviations:
        return {}
    values = torch.tensor(list(deviations.values()), dtype=torch.float64)
    edges = torch.quantile(values, torch.tensor([0.5, 0.75, 0.9, 0.98], dtype=torch.float64))
    return dict(zip(deviations, torch.bucketize(values, edges).tolist(), strict=True))


def _legend(recomputed: int) -> str:
    shades = "".join(
        f'<span class="cb-shade{shade}">{text}</span>'
        for shade, text in enumerate(("low half", "above median", "top 25%", "top 10%", "top 2%"))
    )
    marks = f'<span class="cb-marked">recomputed</span> {recomputed:,} tokens'
    return f'<p class="cb-key"><b>KV deviation</b>, measured in this prompt: {shades} {marks}</p>'


def _runs(engine: BlendEngine, span: ChunkSpan, shades: dict[int, int], marks: frozenset[int]) -> Iterator[str]:
    """Yield a chunk's text, one element for each run of tokens with equal shade and mark."""
    pieces = token_texts(engine, span.chunk)
    looks = [(shades.get(at, 0), at in marks) for at in range(span.start, span.end)]
    for (shade, marked), run in groupby(zip(looks, pieces, strict=True), key=lambda pair: pair[0]):
        text = escape("".join(piece for _, piece in run))
        names = [f"cb-shade{shade}"] * (shade > 0) + ["cb-marked"] * marked
        yield f'<span class="{" ".join(names)}">{text}</span>' if names else text


def token_texts(engine: BlendEngine, chunk: Chunk) -> list[str]:
    """Return the piece of the chunk's text of each token; the joined pieces are the text."""
    token_ids, starts = encoder_for(engine.tokenizer).chunk(chunk.text)
    if token_ids != list(chunk.token_ids):  # tokenised with its neighbours, or registered with ids of its own
        return [engine.tokenizer.decode([token]) for token in chunk.token_ids]
    edges = [0, *starts[1:], len(chunk.text)]
    return [chunk.text[a:b] for a, b in pairwise(edges)]
