"""Blends batches of prompts so that gradients reach the writer of the chunks' KV, and computes the loss of a batch.

All prompts of a batch have their chunks at equal positions. The computed tokens attend by one mask that compares
positions, so stored KV may be in any order: stale KV of recomputed tokens gets a position that no query sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache

from cacheblend_lab.learn.rows import ChunkRows, FreshKV
from cacheblend_rag.blending.rope import Layout, Rope, apply_rotation
from cacheblend_rag.engines.transformers.attention import NAME
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject

NOWHERE = 1 << 30
"""Position behind every query, which no query attends to."""


@dataclass(frozen=True)
class BatchLayout:
    """Holds the positions of header, chunks and answer in every prompt of a batch.

    Attributes:
        header: Token ids of the header, behind which chunk KV is computed.
        spans: Start and end of each chunk, ascending.
        length: Tokens of a prompt with its answer.
        watched: Number of last tokens whose predictions are compared.
        exact: Number of first chunks with exact KV, as in a full prefill; the other chunks have stale KV.
    """

    header: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    length: int
    watched: int
    exact: int = 0

    @property
    def stale(self) -> list[int]:
        """Return the lengths of the chunks with stale KV."""
        return [end - start for start, end in self.spans[self.exact :]]


@dataclass(frozen=True)
class PromptBatch:
    """Holds prompts of one layout, padded behind their ends.

    Attributes:
        layout: Layout of the prompts.
        ids: Token ids, ``[prompts, length]``.
        weights: Weight of the prediction at each watched token, ``[prompts, watched]``; 0 for padding.
    """

    layout: BatchLayout
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def tokens(self) -> int:
        """Return the number of tokens that a full prefill computes."""
        return self.ids.numel()


class StoredBatch(NamedTuple):
    """Holds chunk KV with its positions.

    Attributes:
        keys: Keys of each layer, ``[prompts, kv_heads, stored, dim]``, rotated to their positions.
        values: Values of each layer, ``[prompts, kv_heads, stored, dim]``.
        positions: ``[stored]``.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor


class BatchBlender:
    """Runs a model's own forward over batches, for full prefills, chunk KV and blends of chunk KV."""

    def __init__(self, model: Any):
        """Measure the rotation of a loaded causal LM; raise `NotRotaryError` if there is none."""
        self.model = model
        runner = ModelRunner(model)
        with torch.no_grad():
            self.rope: Rope = TransformersSubject(runner).detect_rope()
        self._latent_first = runner.latent_first
        self.num_layers, self.device, self.dtype = runner.num_layers, runner.device, runner.dtype
        self._window = runner.window
        self._eager = runner.config._attn_implementation != NAME
        types = getattr(model.config.get_text_config(), "layer_types", None) or ()
        self._kinds = sorted(set(types)) if set(types) - {"full_attention"} else []
        self._headers: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.no_grad()
    def prefill(self, batch: PromptBatch, keep_kv: bool = False) -> tuple[torch.Tensor, DynamicCache | None]:
        """Return the logits ``[prompts, watched, vocab]`` of full prefills, and the KV if ``keep_kv``, else None."""
        cache = DynamicCache() if keep_kv else None
        return self._run(self.model, batch.ids, cache, batch.layout.watched), cache

    def write(self, model: Any, batch: PromptBatch) -> StoredBatch:
        """Compute the KV of every stale chunk directly behind the header, and rotate the keys to the chunk's positions.

        ``model`` is the blender's own model, or a writer.
        """
        layout, prompts = batch.layout, len(batch.ids)
        h, lengths = len(layout.header), layout.stale
        target = torch.cat([torch.arange(*span) for span in layout.spans[layout.exact :]]).to(self.device)
        rows = ChunkRows(h, lengths * prompts, self.device)
        source = rows.positions[h : h + len(target)]
        # The header and all chunks of all prompts are one sequence, so that no token is computed twice or is padding.
        header = torch.tensor(layout.header, device=self.device, dtype=batch.ids.dtype)
        ids = torch.cat([header, batch.ids[:, target].flatten()])[None]
        cache = FreshKV()
        at = rows.positions[None]
        mask = self._mask(at, at, rows.related()) if self._eager else None
        with rows.attending():
            self._run(model, ids, cache, 1, position_ids=at, attention_mask=mask)
        sides = zip(*(self._pair(*cache.found[layer]) for layer in range(self.num_layers)), strict=True)
        keys, values = ([part[0, :, h:].unflatten(1, (prompts, -1)).transpose(0, 1) for part in side] for side in sides)
        return StoredBatch(self._moved(keys, source, target), values, target)

    def in_context(self, cache: DynamicCache, positions: torch.Tensor) -> StoredBatch:
        """Return the KV at ``positions``, ``[stored]``, from a full prefill's cache."""
        sides = zip(*(self._pair(layer.keys, layer.values) for layer in cache.layers), strict=True)
        keys, values = ([part[:, :, positions] for part in side] for side in sides)
        return StoredBatch(keys, values, positions)

    def behind_exact(self, layout: BatchLayout, cache: DynamicCache, stale: StoredBatch) -> StoredBatch:
        """Return the KV of all chunks: exact KV from a full prefill's cache, then ``stale`` from :meth:`write`."""
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
        """Return the logits ``[prompts, watched, vocab]`` of blends that recompute the tokens with the highest scores.

        Args:
            batch: The prompts.
            stored: KV of the prompts' chunks.
            scores: Scores of stored tokens, ``[prompts, stored]``; None recomputes no stored token.
            counts: Number of stored tokens that each prompt recomputes.
        """
        layout, rows = batch.layout, len(batch.ids)
        queries = self._forced(layout).expand(rows, -1)
        seen_at = stored.positions.expand(rows, -1)
        own_at = queries
        most = max(counts, default=0)
        if scores is not None and most:
            first = layout.spans[layout.exact - 1][1] if layout.exact else 0
            chosen = scores.masked_fill(seen_at < first, float("-inf")).topk(most, 1).indices
            wanted = torch.tensor(counts, device=self.device)[:, None]
            spare = torch.arange(most, device=self.device) >= wanted
            places = seen_at.gather(1, chosen)
            seen_at = seen_at.scatter(1, chosen, torch.where(spare, places, NOWHERE))
            queries = torch.cat([queries, places], 1)
            own_at = torch.cat([own_at, torch.where(spare, NOWHERE, places)], 1)
            queries, order = queries.sort(1)
            own_at = own_at.gather(1, order)
            # Drop stored KV that no query sees.
            seen_at, kept = (each[:, : int((seen_at != NOWHERE).sum(1).max())] for each in seen_at.sort(1))
            keys, values = ([part.take_along_dim(kept[:, None, :, None], 2) for part in side] for side in stored[:2])
            stored = StoredBatch(keys, values, seen_at)
        header = self._header_kv(layout.header)
        before = torch.arange(len(layout.header), device=self.device).expand(rows, -1)
        cache = DynamicCache()
        for layer, (k, v, h) in enumerate(zip(stored.keys, stored.values, header, strict=True)):
            sides = zip(h, (k, v), strict=True)
            pair = (torch.cat([part.expand(rows, -1, -1, -1) for part in side], 2) for side in sides)
            cache.update(*(reversed(tuple(pair)) if self._latent_first else pair), layer)
        mask = self._mask(queries, torch.cat([before, seen_at, own_at], 1))
        ids = batch.ids.gather(1, queries)
        return self._run(self.model, ids, cache, layout.watched, position_ids=queries, attention_mask=mask)

    def _run(self, model: Any, ids: torch.Tensor, cache: DynamicCache | None, keep: int, **more: Any) -> torch.Tensor:
        out = model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep, **more)
        logits: torch.Tensor = out.logits[:, -keep:]
        return logits

    def _forced(self, layout: BatchLayout) -> torch.Tensor:
        """Return the places ``[tokens]`` behind the header that no chunk covers."""
        computed = torch.ones(layout.length, dtype=torch.bool)
        computed[: len(layout.header)] = False
        for start, end in layout.spans:
            computed[start:end] = False
        return computed.nonzero().squeeze(1).to(self.device)

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, related: torch.Tensor | None = None) -> Any:
        """Return the additive mask ``[prompts, 1, queries, keys]``; a dict if there are several kinds of layers.

        ``related``, ``[queries, keys]``, says which keys a query may see at all; None means every key.
        """
        causal = keys[:, None, None, :] <= queries[:, None, :, None]
        if related is not None:
            causal = causal & related

        def build(kind: str) -> torch.Tensor:
            allowed = causal
            if kind == "sliding_attention" and self._window is not None:
                allowed = causal & (keys[:, None, None, :] > queries[:, None, :, None] - self._window)
            mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
            return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)

        return {kind: build(kind) for kind in self._kinds} if self._kinds else build("sliding_attention")

    @torch.no_grad()
    def _header_kv(self, header: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the header's KV for each layer, computed by the blender's own model."""
        if header not in self._headers:
            cache = DynamicCache()
            # An empty header is replaced by one token, whose KV is cut off below.
            self._run(self.model, torch.tensor([header or (0,)], device=self.device), cache, 1)
            pairs = [self._pair(layer.keys, layer.values) for layer in cache.layers]
            self._headers[header] = [(k[:, :, : len(header)], v[:, :, : len(header)]) for k, v in pairs]
        return self._headers[header]

    def _pair(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated part of a layer's cache, then the other part."""
        return (values, keys) if self._latent_first else (keys, values)

    def _moved(self, keys: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys rotated from source to target positions; layers of one kind are rotated together."""
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
def deviation(stored: StoredBatch, fresh: StoredBatch, lengths: Sequence[int]) -> torch.Tensor:
    """Return the deviation of stored KV from fresh KV, ``[prompts, stored]``, as in the static deviation.

    A token's deviation is its squared distance divided by the mean square of the chunk's fresh KV in the layer, summed
    over K and V, and averaged over all layers after the first. ``lengths`` holds the number of tokens of each chunk.
    """
    total = torch.zeros(1, device=stored.positions.device)
    for old_side, new_side in zip(stored[:2], fresh[:2], strict=True):
        for old, new in zip(old_side[1:], new_side[1:], strict=True):
            width = new.shape[1] * new.shape[3]
            square = torch.split(new.float().square().sum((1, 3)), list(lengths), 1)
            mean = torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in square], 1) / width
            total = total + (old.detach().float() - new.float()).square().sum((1, 3)) / mean.clamp_min(1e-30)
    return total / len(stored.keys[1:])


def divergence(teacher: torch.Tensor, student: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of KL(teacher ‖ student) over predictions, in nats.

    Args:
        teacher: Logits ``[prompts, watched, vocab]``.
        student: Logits ``[prompts, watched, vocab]``.
        weights: ``[prompts, watched]``.
    """
    truth, said = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    kl = (truth.exp() * (truth - said)).sum(-1)
    return (kl * weights).sum() / weights.sum().clamp_min(1e-9)


def count_of(layout: BatchLayout, ratio: float) -> int:
    """Return how many stale tokens a prompt recomputes at a ratio, as the fusor counts them."""
    return round(ratio * sum(layout.stale))


_KERNELS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Lesson:
    """Compares a model's full prefill with the model's blend of a writer's KV."""

    def __init__(self, blender: BatchBlender, writing: Any):
        """Set the blender, and the writer from :func:`cacheblend_lab.learn.adapter.writing_copy`."""
        self.blender, self.writing = blender, writing

    def loss(self, batch: PromptBatch, ratio: float = 0.0, plain: bool = False) -> torch.Tensor:
        """Return the KL divergence in nats, a differentiable scalar.

        Args:
            batch: The prompts.
            ratio: Share of the stale tokens to recompute; the tokens with the largest KV deviation are chosen.
            plain: Whether the model itself computes the chunk KV instead of the writer.
        """
        with self.autocast():
            layout = batch.layout
            teacher, cache = self.blender.prefill(batch, keep_kv=True)
            assert cache is not None
            stale = self.blender.write(self.blender.model if plain else self.writing, batch)
            stored = self.blender.behind_exact(layout, cache, stale)
            scores = self._scores(layout, stale, cache) if ratio > 0 else None
            del cache
            counts = [count_of(layout, ratio)] * len(batch.ids)
            student = self.blender.blend(batch, stored, scores, counts)
        return divergence(teacher, student, batch.weights)

    def _scores(self, layout: BatchLayout, stale: StoredBatch, cache: Any) -> torch.Tensor:
        """Return the KV deviation of all stored tokens, ``[prompts, stored]``; 0 for the exact chunks."""
        fresh = self.blender.in_context(cache, stale.positions)
        found = deviation(stale, fresh, layout.stale)
        return pad(found, (sum(end - start for start, end in layout.spans[: layout.exact]), 0))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the LoRA, whose parameters are fp32, in the model's dtype inside the context."""
        low, device = self.blender.dtype != torch.float32, self.blender.device.type
        # cuDNN's attention compiles for every new shape, and every batch has a new shape.
        with sdpa_kernel(_KERNELS), torch.autocast(device, self.blender.dtype if low else torch.bfloat16, enabled=low):
            yield
