"""Varies `static` and `static-query`: probe, layers, K or V, scale, exponent, budget, blocks, digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import torch

from cacheblend_rag.blending.gate import cut
from cacheblend_rag.blending.policies import Candidates, SelectionPolicy, highest, policy
from cacheblend_rag.blending.settings import BlendSchedule, FuseOptions
from cacheblend_rag.blending.static import Distances, probe_ids, static_parts
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.lab.doctor.compared import PromptMeasurement, Scored
from cacheblend_rag.lab.evaluation.ablation.deviation import RATIOS
from cacheblend_rag.lab.evaluation.ablation.tally import Comparisons
from cacheblend_rag.lab.evaluation.attention import AttentionInspector
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV

BASE: Final = "static"
"""What is in use, and what the other variants are held against."""
DIGEST: Final = 0.3
"""Share of a chunk's tokens in its digest, those of highest static deviation."""
BLOCK: Final = 16
_SHORT_PROBE: Final = 64


class _PerChunk(Scored):
    """The ratio holds in every chunk, not over the prompt."""

    name = "per chunk"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        mask = torch.zeros_like(candidates.positions, dtype=torch.bool)
        for chunk in torch.unique(candidates.chunk):
            own = (candidates.chunk == chunk).nonzero().squeeze(1)
            share = round(count * len(own) / len(mask))
            mask[own[highest(self._scores[own], share)]] = True
        return mask


class _Blocks(Scored):
    """Whole blocks of the prompt's KV cache, those of highest sum, as many as the ratio allows."""

    name = "blocks"

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        numbers, block = torch.unique(candidates.positions // BLOCK, return_inverse=True)
        sums = torch.zeros(len(numbers)).index_add_(0, block, self._scores)
        sizes = torch.bincount(block)
        order = torch.argsort(sums, descending=True, stable=True)
        fits = sizes[order].cumsum(0) <= count
        return torch.isin(block, order[fits])


@dataclass(frozen=True)
class _Known:
    """Holds what is known of one prompt before its blend.

    Attributes:
        distances: By probe, one for each chunk with stale KV.
        attention: The question's, over stored KV, ``[layers, candidates]``.
        digest: The same if only the digests' KV is there, ``[candidates]``, 0 outside them.
        oracle: Deviation of all layers in this prompt, ``[candidates]``.
    """

    distances: dict[str, list[Distances]]
    attention: torch.Tensor
    digest: torch.Tensor
    oracle: torch.Tensor

    def static(
        self,
        probe: str = "bundled text",
        parts: tuple[int, ...] = (0, 1),
        layers: slice = slice(None),
        scaled: bool = True,
    ) -> torch.Tensor:
        """Return a static deviation ``[candidates]`` of some parts (0 keys, 1 values) and layers (0 is the model's layer 1)."""
        found = []
        for chunk in self.distances[probe]:
            values = chunk.squared / chunk.mean_square[..., None] if scaled else chunk.squared
            found.append(values[layers][:, list(parts)].sum(1).mean(0))
        return torch.cat(found)


def ablate_static(
    engine: TransformersEngine,
    prompts: Sequence[TokenizedPrompt],
    check_layer: int,
    ratios: Sequence[float] = RATIOS,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Return what :meth:`Comparisons.means` gives.

    ``none`` is full KV reuse.

    Raises:
        ModelError: The model is not blended, or its attention cannot be watched.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")
    compared = Comparisons()
    end = getattr(engine.tokenizer, "eos_token_id", None)
    check = BlendSchedule((check_layer,), (1.0,))
    for number, prompt in enumerate(prompts):
        if progress:
            progress(f"prompt {number + 1} of {len(prompts)}")
        measurement = PromptMeasurement(engine.subject(), engine.rope, engine.header_ids, prompt, end)
        foreign = prompts[number - 1].spans[-1].chunk.token_ids  # of the prompt before: another context
        known = _know(engine, prompt, measurement, foreign)
        runs: list[tuple[str, float, SelectionPolicy]] = [("none", 0.0, policy("full-reuse"))]
        chosen = _variants(known) | {"random": policy("random"), "hkvd (with its dense pass)": policy("hkvd")}
        runs += [(name, ratio, selection) for name, selection in chosen.items() for ratio in ratios]
        for name, ratio, selection in runs:
            compared.note(name, ratio, measurement.compare(FuseOptions(selection, ratio, check)))
    return compared.means(BASE)


def _variants(known: _Known) -> dict[str, SelectionPolicy]:
    static, attention = known.static(), known.attention.mean(0)
    # Of the layers from 1 on, as `static` counts them.
    count = len(known.attention) - 1
    middle = slice(max(0, count // 2 - 1), count // 2 + 2)
    scores = {
        BASE: static,
        **{f"static, probe: {name}": known.static(name) for name in list(known.distances)[1:]},
        "static, two probes": known.static() + known.static("chunk of another context"),
        "static, K alone": known.static(parts=(0,)),
        "static, V alone": known.static(parts=(1,)),
        "static, first layer behind 0": known.static(layers=slice(0, 1)),
        "static, three middle layers": known.static(layers=middle),
        "static, last layer": known.static(layers=slice(-1, None)),
        "static, layers not scaled": known.static(scaled=False),
        "oracle: deviation in this prompt": known.oracle,
        "query": attention,
        "static-query": static.sqrt() * attention,
        "static-query, exponent 1/4": static**0.25 * attention,
        "static-query, exponent 1": static * attention,
        "static-query, attention up to the middle": static.sqrt() * known.attention[: middle.stop + 1].mean(0),
        "static-query, attention of three middle layers": static.sqrt() * known.attention[1:][middle].mean(0),
        f"static-query, digest of {DIGEST:.0%}": static.sqrt() * known.digest,
    }
    return {
        **{name: Scored(values) for name, values in scores.items()},
        "static, budget per chunk": _PerChunk(static),
        f"static, blocks of {BLOCK}": _Blocks(static),
        f"static-query, blocks of {BLOCK}": _Blocks(static.sqrt() * attention),
    }


def _know(
    engine: TransformersEngine, prompt: TokenizedPrompt, measurement: PromptMeasurement, foreign: Sequence[int]
) -> _Known:
    inspector = AttentionInspector(engine, prompt)
    chunks = [prompt.token_ids[start:end] for start, end in measurement.stale]
    bundled = probe_ids(engine.tokenizer, engine.subject().vocab_size, engine.context_window)
    shuffled = Random(0).sample(bundled, len(bundled))
    starts = [start for start, _ in measurement.stale]
    before = [span.chunk.token_ids for span in prompt.spans if any(span.end <= start for start in starts)]
    alone = [_behind(engine, engine.header_ids, ids) for ids in chunks]
    probes: dict[str, Sequence[Sequence[int]]] = {
        "bundled text": [bundled] * len(chunks),
        f"its first {_SHORT_PROBE} tokens": [bundled[:_SHORT_PROBE]] * len(chunks),
        "its tokens, shuffled": [shuffled] * len(chunks),
        "chunk of another context": [foreign] * len(chunks),
        "the chunk before it": before[-len(chunks) :],
    }
    distances = {
        name: [_distances(engine, *row) for row in zip(each, chunks, alone, strict=True)]
        for name, each in probes.items()
    }
    inside = torch.cat([torch.arange(start, end) for start, end in measurement.stale])
    outside = torch.cat(
        [~highest(chunk.mean(), round(DIGEST * chunk.squared.shape[-1])) for chunk in distances["bundled text"]]
    )
    seen = inspector.measure_attention(FuseOptions(policy("full-reuse"), 0.0))
    digest = inspector.measure_attention_without(inside[outside])
    return _Known(distances, seen.mean((1, 2))[:, inside], digest.mean((0, 1, 2))[inside], measurement.oracle)


def _behind(engine: TransformersEngine, before: Sequence[int], ids: Sequence[int]) -> ChunkKV:
    return cut(engine.subject().full_prefill([*before, *ids])[1], len(before))


def _distances(engine: TransformersEngine, probe: Sequence[int], ids: Sequence[int], alone: ChunkKV) -> Distances:
    """Measure a chunk behind ``probe``, as the engine's ranking does behind the bundled text."""
    assert engine.rope is not None
    behind = _behind(engine, [*engine.header_ids, *probe], ids)
    return Distances.of(static_parts(alone, behind.layers, behind.start, engine.rope))
