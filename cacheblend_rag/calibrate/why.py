"""Shows a prompt's chunks, coloured by KV deviation, with the recomputed tokens marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import torch

from cacheblend_rag.blending.fusor import FuseResult, fuse, kv_deviation
from cacheblend_rag.blending.outcome import ChunkOutcome
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.calibrate.compared import fresh_and_stale, planner_of
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.retrieval.index import Hit


class PromptInspector:
    """Inspects one tokenised prompt of an engine; all chunks of the prompt are precomputed.

    Attributes:
        tokens: The prompt.
        stale: Positions of the tokens with stale KV.
    """

    def __init__(self, engine: TransformersEngine, tokens: TokenizedPrompt):
        """Precompute the prompt's chunks and plan the prompt.

        Raises:
            ModelError: The model is not blended, or the prompt has no token with stale KV.
        """
        plan = planner_of(engine)
        assert engine.rope is not None
        self._engine, self._rope, self.tokens = engine, engine.rope, tokens
        self._plan = plan(tokens)
        if not self._plan.stale:
            raise ModelError("This prompt has no chunk behind the first, so no KV of it is stale; use more chunks.")
        self.stale = torch.cat([torch.arange(span.start, span.end) for span in self._plan.stale])

    def measure_deviation(self) -> torch.Tensor:
        """Return the KV deviation ``[layers, tokens with stale KV]`` of full KV reuse, in fp32 on the CPU."""
        pairs = fresh_and_stale(self._plan, self._engine.subject(), self.tokens, self._rope)
        return torch.stack([kv_deviation(*pair).cpu() for pair in pairs])

    def recomputed(self, settings: BlendSettings) -> torch.Tensor:
        """Blend the prompt as the engine does, and return the positions of the recomputed tokens, on the CPU."""
        _, result = self._blended(self._engine.profile.resolve(settings, self._engine.num_layers))
        return result.recomputed.cpu()

    def _blended(self, options: FuseOptions) -> tuple[TransformersTarget, FuseResult]:
        target = TransformersTarget(self._engine.runner, self._rope, self.tokens.token_ids)
        return target, fuse(self._plan, target, options)


def _measured(
    engine: BlendEngine, prompt: TokenizedPrompt, settings: BlendSettings
) -> tuple[dict[int, float], frozenset[int]]:
    """Return the deviation of stored KV from the prompt's full prefill by position, and the positions a blend recomputes.

    Layers differ in scale, so that each layer is divided by its mean; a token's deviation is the mean over layers.
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
    return dict(zip(inspector.stale.tolist(), mean.tolist(), strict=True)), frozenset(chosen)


def shown_deviations(
    engine: BlendEngine,
    prompt: TokenizedPrompt,
    settings: BlendSettings,
    hits: Iterable[Hit],
    chunks: Iterable[ChunkOutcome] = (),
) -> str:
    """Return the prompt's chunks as HTML: five shades by deviation, recomputed tokens underlined.

    Raises:
        InputError: The engine does not show its KV.
        ModelError: The model is not blended, or no KV of the prompt is stale.
    """
    deviations, recomputed = _measured(engine, prompt, settings)
    shades = _shades(deviations)
    fates = {chunk.id: chunk.fate for chunk in chunks}
    sources = {source.id: (number, source) for number, source in enumerate(hits, 1)}
    parts = [_legend(len(recomputed))]
    for span in prompt.spans:
        (number, source), fate = sources[span.chunk.id], fates.get(span.chunk.id, "")
        note = "exact: nothing of it deviates" if fate == "exact" else fate
        text = "".join(_runs(engine, span, {} if fate == "exact" else shades, recomputed))
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
