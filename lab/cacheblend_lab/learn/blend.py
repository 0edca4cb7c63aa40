"""Blends batches of prompts so that gradients reach whoever wrote the chunks' KV: place, then the computed tokens, nothing else.

All prompts of a batch have their chunks at the same places. The computed tokens attend by one mask that compares positions, so
stored KV need not lie in order: padding, and what is recomputed, simply stands at a position that nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from cacheblend_rag.blending.rope import Layout, Rope, apply_rotation
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject

NOWHERE = 1 << 30
"""A position behind every query: who stands there is not seen."""


@dataclass(frozen=True)
class BatchLayout:
    """Says where things stand in every prompt of a batch.

    Attributes:
        header: What stands before the chunks, and what they are computed behind.
        spans: Start and end of each chunk, ascending.
        length: Tokens of a prompt with its answer.
        watched: So many last tokens are those whose predictions are compared.
        exact: So many chunks from the first on are as the prefill has them; the others are stale.
        fork: Where a second continuation of the prompt begins, which sees nothing of the first; 0 if there is none. The
            prompt's last token is the first that is watched.
    """

    header: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    length: int
    watched: int
    exact: int = 0
    fork: int = 0

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens at ``places`` of a row: a second continuation stands where the first does."""
        second = (places >= self.fork) & (places != NOWHERE)
        return torch.where(second, places - self.fork + self.length - self.watched + 1, places) if self.fork else places


@dataclass(frozen=True)
class PromptBatch:
    """Holds prompts of one layout, padded behind their ends.

    Attributes:
        layout: Where their chunks stand.
        ids: ``[prompts, length]``.
        weights: What the prediction at each watched token counts, ``[prompts, watched]``; 0 for padding.
    """

    layout: BatchLayout
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def tokens(self) -> int:
        """Return how many tokens a full prefill computes."""
        return self.ids.numel()


class StoredBatch(NamedTuple):
    """Holds chunk KV at its places.

    Attributes:
        keys: One a layer, ``[prompts, kv_heads, stored, dim]``, rotated to their positions.
        values: Likewise.
        positions: ``[stored]``; padding stands where nobody sees it.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor


class BatchBlender:
    """Runs a model's own forward over whole batches: full prefills, chunk KV, blends of it."""

    def __init__(self, model: Any):
        """Measure the rotation of a loaded causal LM; raises NotRotaryError."""
        self.model = model
        runner = ModelRunner(model)
        with torch.no_grad():
            self.rope: Rope = TransformersSubject(runner).detect_rope()
        self._latent_first = runner.latent_first
        self.num_layers, self.device, self.dtype = runner.num_layers, runner.device, runner.dtype
        self._window = runner.window
        types = getattr(model.config.get_text_config(), "layer_types", None) or ()
        self._kinds = sorted(set(types)) if set(types) - {"full_attention"} else []
        self._headers: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.no_grad()
    def prefill(self, batch: PromptBatch, keep_kv: bool = False) -> tuple[torch.Tensor, DynamicCache | None]:
        """Return the logits ``[prompts, watched, vocab]`` of full prefills, and their KV if it is wanted."""
        cache = DynamicCache() if keep_kv else None
        return self._run(self.model, batch.ids, cache, batch.layout.watched), cache

    @torch.no_grad()
    def follow(self, batch: PromptBatch, cache: DynamicCache, model: Any = None) -> torch.Tensor:
        """Return the logits ``[prompts, watched, vocab]`` of full prefills, of which only the watched tokens are left.

        Args:
            batch: The prompts, with one continuation each or two.
            cache: KV of all tokens before the watched ones; it grows by those.
            model: Whose; None for this blender's own.
        """
        layout = batch.layout
        places = torch.arange(layout.length, device=self.device).expand(len(batch.ids), -1)
        tail = places[:, -layout.watched :]
        model = self.model if model is None else model
        mask = self._mask(layout, tail, places, model.dtype)
        ids, at = batch.ids[:, -layout.watched :], layout.positions(tail)
        return self._run(model, ids, cache, layout.watched, position_ids=at, attention_mask=mask)

    @torch.no_grad()
    def start(self, model: Any, ids: Sequence[int]) -> DynamicCache:
        """Return a model's KV of what others come behind."""
        cache = DynamicCache()
        self._run(model, torch.tensor([ids], device=self.device), cache, 1)
        return cache

    def write(
        self, model: Any, batch: PromptBatch, probe: Sequence[int] = (), start: DynamicCache | None = None
    ) -> StoredBatch:
        """Compute the KV of every stale chunk behind the header, and move it to its place.

        Args:
            model: This blender's own, or one that writes in its place.
            batch: The prompts.
            probe: Token ids that stand between header and chunk.
            start: That model's KV of header and probe, one row; None computes it beside every chunk, for gradients.
        """
        layout = batch.layout
        h, spans = len(layout.header) + len(probe), layout.spans[layout.exact :]
        starts = torch.tensor([start for start, _ in spans], device=self.device)[:, None]
        ends = torch.tensor([end for _, end in spans], device=self.device)[:, None]
        width = max(end - start for start, end in spans)
        offsets = torch.arange(width, device=self.device)
        target = starts + offsets
        # Padding stands behind each chunk, where causal attention never looks from: any tokens will do.
        chunks = batch.ids[:, target.clamp(max=layout.length - 1)].flatten(0, 1)
        cache, ids = DynamicCache(), chunks
        if start is None:
            before = torch.tensor([*layout.header, *probe], device=self.device, dtype=chunks.dtype)
            ids = torch.cat([before.expand(len(chunks), h), chunks], 1)
        for layer, one in enumerate(start.layers if start else ()):
            cache.update(*(side.expand(len(chunks), -1, -1, -1) for side in (one.keys, one.values)), layer)
        self._run(model, ids, cache, 1)
        source = (offsets + h).expand_as(target).flatten()
        keys, values = self._apart(cache, h, len(batch.ids))
        keys = self._moved(keys, source, target.flatten())
        positions = torch.where(target < ends, target, NOWHERE).flatten()
        return StoredBatch(keys, values, positions)

    def in_context(self, cache: DynamicCache, positions: torch.Tensor) -> StoredBatch:
        """Return a full prefill's KV of the tokens at ``positions``, ``[stored]``."""
        at = torch.where(positions == NOWHERE, 0, positions)
        sides = zip(*(self._pair(layer) for layer in cache.layers), strict=True)
        keys, values = ([part[:, :, at] for part in side] for side in sides)
        return StoredBatch(keys, values, positions)

    def behind_exact(self, layout: BatchLayout, cache: DynamicCache, stale: StoredBatch) -> StoredBatch:
        """Return the KV of all chunks: the exact ones as a full prefill has them, behind them what :meth:`write` returned."""
        inside = [torch.arange(*span, device=self.device) for span in layout.spans[: layout.exact]]
        if not inside:
            return stale
        exact = self.in_context(cache, torch.cat(inside))
        sides = [
            [torch.cat(pair, 2) for pair in zip(*sides, strict=True)]
            for sides in zip(exact[:2], stale[:2], strict=True)
        ]
        return StoredBatch(sides[0], sides[1], torch.cat([exact.positions, stale.positions]))

    def blend(
        self,
        batch: PromptBatch,
        stored: StoredBatch,
        scores: torch.Tensor | None = None,
        counts: Sequence[int] = (),
    ) -> torch.Tensor:
        """Return the logits ``[prompts, watched, vocab]`` of blends that recompute the tokens of highest score.

        Args:
            batch: The prompts.
            stored: Their chunks' KV.
            scores: Of stored tokens, ``[prompts, stored]``; None recomputes none.
            counts: How many of them each prompt recomputes.
        """
        layout, rows = batch.layout, len(batch.ids)
        queries = self._forced(layout).expand(rows, -1)
        seen_at = stored.positions.expand(rows, -1)
        own_at = queries
        most = max(counts, default=0)
        if scores is not None and most:
            first = layout.spans[layout.exact - 1][1] if layout.exact else 0
            candidates = (seen_at >= first) & (seen_at != NOWHERE)
            chosen = scores.masked_fill(~candidates, float("-inf")).topk(most, 1).indices
            wanted = torch.tensor(counts, device=self.device)[:, None]
            spare = torch.arange(most, device=self.device) >= wanted
            places = seen_at.gather(1, chosen)
            seen_at = seen_at.scatter(1, chosen, torch.where(spare, places, NOWHERE))
            queries = torch.cat([queries, places], 1)
            own_at = torch.cat([own_at, torch.where(spare, NOWHERE, places)], 1)
            queries, order = queries.sort(1)
            own_at = own_at.gather(1, order)
            # Stored KV that nobody sees need not be read.
            seen_at, kept = (each[:, : int((seen_at != NOWHERE).sum(1).max())] for each in seen_at.sort(1))
            keys, values = ([part.take_along_dim(kept[:, None, :, None], 2) for part in side] for side in stored[:2])
            stored = StoredBatch(keys, values, seen_at)
        header = self.header_kv(layout.header)
        before = torch.arange(len(layout.header), device=self.device).expand(rows, -1)
        cache = DynamicCache()
        for layer, (k, v, h) in enumerate(zip(stored.keys, stored.values, header, strict=True)):
            sides = zip(h, (k, v), strict=True)
            pair = (torch.cat([part.expand(rows, -1, -1, -1) for part in side], 2) for side in sides)
            cache.update(*(reversed(tuple(pair)) if self._latent_first else pair), layer)
        mask = self._mask(layout, queries, torch.cat([before, seen_at, own_at], 1), self.dtype)
        ids, at = batch.ids.gather(1, queries), layout.positions(queries)
        return self._run(self.model, ids, cache, layout.watched, position_ids=at, attention_mask=mask)

    def _run(self, model: Any, ids: torch.Tensor, cache: DynamicCache | None, keep: int, **more: Any) -> torch.Tensor:
        out = model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep, **more)
        logits: torch.Tensor = out.logits[:, -keep:]
        return logits

    def _forced(self, layout: BatchLayout) -> torch.Tensor:
        """Return the positions ``[tokens]`` behind the header that no chunk covers."""
        computed = torch.ones(layout.length, dtype=torch.bool)
        computed[: len(layout.header)] = False
        for start, end in layout.spans:
            computed[start:end] = False
        return computed.nonzero().squeeze(1).to(self.device)

    def _mask(self, layout: BatchLayout, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the additive mask ``[prompts, 1, queries, keys]``, one for each kind of layer where there are several."""
        causal = keys[:, None, None, :] <= queries[:, None, :, None]
        if layout.fork:
            others = (keys > layout.length - layout.watched) & (keys < layout.fork)
            causal = causal & ~((queries >= layout.fork)[:, None, :, None] & others[:, None, None, :])
        queries, keys = layout.positions(queries), layout.positions(keys)

        def build(kind: str) -> torch.Tensor:
            allowed = causal
            if kind == "sliding_attention" and self._window is not None:
                allowed = causal & (keys[:, None, None, :] > queries[:, None, :, None] - self._window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
            return mask.masked_fill_(~allowed, torch.finfo(dtype).min)

        return {kind: build(kind) for kind in self._kinds} if self._kinds else build("sliding_attention")

    @torch.no_grad()
    def header_kv(self, header: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the header's own KV, which the plain model computes."""
        if header not in self._headers:
            # Without a header one token stands for it, of which nothing is kept.
            pairs = [self._pair(layer) for layer in self.start(self.model, header or (0,)).layers]
            self._headers[header] = [(k[:, :, : len(header)], v[:, :, : len(header)]) for k, v in pairs]
        return self._headers[header]

    def _pair(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is rotated of a layer's cache, and the other."""
        return (layer.values, layer.keys) if self._latent_first else (layer.keys, layer.values)

    def _apart(self, cache: DynamicCache, h: int, prompts: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return keys and values behind the header, the chunks of each prompt one behind the other."""
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for layer in cache.layers:
            for side, part in zip(sides, self._pair(layer), strict=True):
                chunks = part[:, :, h:].reshape(prompts, -1, *part.shape[1:2], part.shape[2] - h, part.shape[3])
                side.append(chunks.transpose(1, 2).flatten(2, 3))
        return sides

    def _moved(self, keys: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys rotated from their source to their target positions; layers of a kind are moved together."""
        rotations = self.rope.rotations(source, target)
        found = list(keys)
        groups: dict[tuple[int, Layout, torch.Size], list[int]] = {}
        for layer, (table, layout) in enumerate(zip(self.rope.table_of_layer, self.rope.layout_of_layer, strict=True)):
            if layout != "none":
                groups.setdefault((table, layout, keys[layer].shape), []).append(layer)
        for (table, kind, _), layers in groups.items():
            moved = apply_rotation(torch.stack([keys[layer] for layer in layers]), rotations[table], kind)
            for layer, one in zip(layers, moved.unbind(), strict=True):
                found[layer] = one
        return found


@torch.no_grad()
def deviation(stored: StoredBatch, fresh: StoredBatch, chunks: int) -> torch.Tensor:
    """Return how far stored KV is from fresh KV, ``[prompts, stored]``, as static deviation is measured.

    Squared distance by the mean square of the chunk's fresh KV in that layer, K plus V, mean over the layers behind the first.
    """
    total = torch.zeros(1, device=stored.positions.device)
    inside = (stored.positions != NOWHERE).view(chunks, -1)
    for old_side, new_side in zip(stored[:2], fresh[:2], strict=True):
        for old, new in zip(old_side[1:], new_side[1:], strict=True):
            width = new.shape[1] * new.shape[3]
            square = new.float().square().sum((1, 3)).view(-1, *inside.shape) * inside
            mean = square.sum(2, keepdim=True) / inside.sum(1, keepdim=True) / width
            far = (old.detach().float() - new.float()).square().sum((1, 3)).view(-1, *inside.shape)
            total = total + far / mean.clamp_min(1e-30)
    return (total / len(stored.keys[1:])).flatten(1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher ‖ student) in nats, the mean over predictions by their weights.

    Args:
        teacher: Logits ``[prompts, watched, vocab]``.
        student: Likewise.
        weights: ``[prompts, watched]``.
    """
    return (divergences(teacher, student) * weights).sum() / weights.sum().clamp_min(1e-9)


def divergences(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher ‖ student) of each prediction, ``[prompts, watched]``."""
    truth, said = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (truth.exp() * (truth - said)).sum(-1)


def count_of(layout: BatchLayout, ratio: float) -> int:
    """Return how many tokens a prompt recomputes at a ratio, as the fusor counts them."""
    return round(ratio * sum(end - start for start, end in layout.spans[layout.exact :]))
