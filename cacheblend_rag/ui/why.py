"""Shows why: a prompt's chunks, coloured by KV deviation, with the recomputed tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for
from cacheblend_rag.prompts.prompt import ChunkSpan
from cacheblend_rag.rag.fates import PromptInspector, prompt_fate
from cacheblend_rag.ui.conversation import Exchange

_LEVELS = 5


@dataclass(frozen=True)
class Deviations:
    """Measures how far tokens' stored KV is from what the prompt makes of it.

    Attributes:
        of: By position in the prompt.
        measured: Whether it was measured in this prompt; else it is the static deviation, ranked at indexing.
        recomputed: Positions that were recomputed; None where they are not known.
    """

    of: dict[int, float]
    measured: bool
    recomputed: frozenset[int] | None


def stored_deviations(exchange: Exchange) -> Deviations:
    """Read the chunks' static deviations from the store, and which tokens the answer recomputed.

    Raises:
        InputError: This process cannot see them; the message says what to do.
    """
    assert exchange.engine is not None
    assert exchange.prompt is not None
    entries = exchange.engine.entries
    if entries is None:
        raise InputError(
            "The server keeps the KV, so its deviation cannot be shown here. Run `cacheblend ui` on the server's store instead."
        )
    found: dict[int, float] = {}
    for span in exchange.prompt.spans:
        kv = entries.get(span.chunk.token_ids, exchange.engine.num_layers)
        static = None if kv is None else kv.static_deviation()
        if kv is not None:
            kv.finish()
        if static is not None:
            found.update(zip(range(span.start, span.end), static.tolist(), strict=True))
    if not found:
        raise InputError(
            "The tokens of these chunks were not ranked when they were indexed. Choose “measured in this prompt”, or ask "
            "with the policy static, which ranks behind its answer what that used."
        )
    return Deviations(found, False, _answers_own(exchange))


def measured_deviations(exchange: Exchange, settings: BlendSettings) -> Deviations:
    """Measure the KV deviation in this very prompt, beside a full prefill, and blend it once more to see what is recomputed.

    Layers differ in scale, so each is divided by its mean; a token's deviation is the mean over layers.

    Raises:
        InputError: The engine does not show its KV.
        ModelError: The model is not blended, or no KV of the prompt is stale.
    """
    assert exchange.prompt is not None
    engine = exchange.engine
    if not isinstance(engine, TransformersEngine):
        raise InputError(
            "Only the transformers engine can measure KV deviation in a prompt. Choose “ranked at indexing”."
        )
    inspector = PromptInspector(engine, exchange.prompt)
    layers = inspector.measure_deviation()[1:]  # layer 0 depends on nothing but the token
    mean = (layers / layers.mean(1, keepdim=True).clamp_min(1e-30)).mean(0)
    wanted = engine.profile.resolve(settings, engine.num_layers)
    chosen = frozenset(inspector.recomputed(settings).tolist()) if wanted.reuse == "chunks" else _answers_own(exchange)
    return Deviations(dict(zip(inspector.stale.tolist(), mean.tolist(), strict=True)), True, chosen)


def answer_again(exchange: Exchange, sampling: SamplingParams, settings: BlendSettings) -> Exchange:
    """Answer the same prompt with other blend options; the conversation keeps the answer it has.

    Raises:
        CacheBlendError: As :meth:`BlendEngine.generate` does.
    """
    assert exchange.engine is not None
    assert exchange.prompt is not None
    done = exchange.engine.generate(exchange.prompt, sampling, settings)
    fate = prompt_fate(exchange.engine, exchange.prompt, done, settings)
    return replace(exchange, text=done.text, generation=done, fate=fate, outcome="done", notes=())


def _answers_own(exchange: Exchange) -> frozenset[int] | None:
    if exchange.fate is None or any(chunk.recomputed is None for chunk in exchange.fate.chunks):
        return None
    return frozenset(at for chunk in exchange.fate.chunks for at in chunk.recomputed or ())


def coloured(exchange: Exchange, deviations: Deviations) -> str:
    """Return the prompt's chunks as HTML: five shades by rank of deviation, recomputed tokens underlined."""
    assert exchange.engine is not None
    assert exchange.prompt is not None
    shades = _shades(deviations.of)
    marks = deviations.recomputed or frozenset()
    fates = {} if exchange.fate is None else {fate.id: fate.fate for fate in exchange.fate.chunks}
    sources = {source.id: source for source in exchange.sources}
    parts = [_legend(deviations)]
    for number, span in enumerate(exchange.prompt.spans, 1):
        source, fate = sources[span.chunk.id], fates.get(span.chunk.id, "")
        note = "exact: nothing of it deviates" if fate == "exact" else fate
        text = "".join(_runs(exchange.engine, span, {} if fate == "exact" else shades, marks))
        parts.append(
            f'<details class="cb-card"{"" if fate == "exact" else " open"}><summary><b>{number}</b> '
            f"{escape(Path(source.path).name)} <small>{source.place}; {note}</small></summary>"
            f'<div class="cb-text cb-tokens">{text}</div></details>'
        )
    return "".join(parts)


def _shades(deviations: dict[int, float]) -> dict[int, int]:
    """Return each position's shade, 0 to 4: half of all tokens have none, and the highest 2% have the deepest."""
    if not deviations:
        return {}
    values = torch.tensor(list(deviations.values()), dtype=torch.float64)
    edges = torch.quantile(values, torch.tensor([0.5, 0.75, 0.9, 0.98], dtype=torch.float64))
    return dict(zip(deviations, torch.bucketize(values, edges).tolist(), strict=True))


def _legend(deviations: Deviations) -> str:
    what = "measured in this prompt" if deviations.measured else "static deviation, ranked at indexing"
    shades = "".join(
        f'<span class="cb-shade{shade}">{text}</span>'
        for shade, text in enumerate(("low half", "above median", "top 25%", "top 10%", "top 2%"))
    )
    known = deviations.recomputed is not None
    marks = (
        f'<span class="cb-marked">recomputed</span> {len(deviations.recomputed or ()):,} tokens'
        if known
        else "Which tokens were recomputed this engine does not tell."
    )
    return f'<p class="cb-key"><b>KV deviation</b> ({what}): {shades} {marks}</p>'


def _runs(engine: BlendEngine, span: ChunkSpan, shades: dict[int, int], marks: frozenset[int]) -> Iterator[str]:
    """Yield a chunk's text, one element for each run of tokens that look alike."""
    pieces = token_texts(engine, span.chunk)
    looks = [(shades.get(at, 0), at in marks) for at in range(span.start, span.end)]
    for (shade, marked), run in groupby(zip(looks, pieces, strict=True), key=lambda pair: pair[0]):
        text = escape("".join(piece for _, piece in run))
        names = [f"cb-shade{shade}"] * (shade > 0) + ["cb-marked"] * marked
        yield f'<span class="{" ".join(names)}">{text}</span>' if names else text


def token_texts(engine: BlendEngine, chunk: Chunk) -> list[str]:
    """Return the piece of the chunk's text that each of its tokens stands for; together they are the text."""
    token_ids, starts = encoder_for(engine.tokenizer).chunk(chunk.text)
    if token_ids != list(chunk.token_ids):  # cut with neighbours, or registered with ids of its own
        return [engine.tokenizer.decode([token]) for token in chunk.token_ids]
    edges = [0, *starts[1:], len(chunk.text)]
    return [chunk.text[a:b] for a, b in pairwise(edges)]
