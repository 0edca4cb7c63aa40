"""Runs a pass of few tokens in vLLM with attention of our own, which can be watched: vLLM's shows no weights.

It writes nothing into the paged cache, so it may run tokens that have no pages yet, as the question has none while a blend runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from vllm.forward_context import set_forward_context

from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV

# Queries whose scores are in memory at once.
_BLOCK = 64


class WatchedPass:
    """Runs tokens of a sequence over the KV in its pages and sums up what those from a position on attend to."""

    def __init__(
        self,
        paged: PagedModel,
        ids: torch.Tensor,
        pages: Pages,
        before_layer: Callable[[int], None],
        watch_from: int,
    ):
        """Run tokens of the prompt ``ids``, ``[prompt tokens]``, the first of which have their KV in ``pages``.

        Args:
            paged: The model.
            ids: Token ids, in host memory.
            pages: Those of the first positions, or of all.
            before_layer: Called with each layer's index before its pages are read.
            watch_from: The first watched position.

        Raises:
            InputError: The model's attention is not the plain one.
        """
        for attention in paged.attention:
            if getattr(attention.impl, "alibi_slopes", None) is not None:
                raise InputError(
                    "The attention of this model cannot be watched in vLLM; choose a policy that does not need it, such as "
                    "static or hkvd."
                )
        self._paged, self._ids, self._pages = paged, ids, pages
        self._before_layer, self._watch_from = before_layer, watch_from
        self._computed: list[list[tuple[torch.Tensor, torch.Tensor, LayerKV]]] = [[] for _ in paged.attention]
        self._total = torch.zeros(len(ids), device=paged.device)
        # In host memory, and on the device.
        self._at = self._positions = torch.empty(0, dtype=torch.int64)
        self._watched = 0

    @torch.inference_mode()
    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``, ``[tokens]``, in host memory; every later call's lie behind them."""
        paged = self._paged
        self._at, self._positions = positions, sent(positions, paged.device)
        with (
            # Without metadata vLLM's attention does nothing, and without slots it stores nothing.
            set_forward_context(None, paged.config, num_tokens=len(positions), slot_mapping={}, skip_compiled=True),
            ExitStack() as hooks,
        ):
            for layer, attention in enumerate(paged.attention):
                hook = partial(self._replace, layer)
                hooks.callback(attention.register_forward_hook(hook, with_kwargs=True).remove)
            paged.run(self._ids[positions], self._positions)
        self._watched += int((positions >= self._watch_from).sum())

    def mean(self) -> torch.Tensor:
        """Attention to each token of the prompt, ``[prompt tokens]``, fp32, mean over layers, heads and watched tokens."""
        attentions = self._paged.attention
        return self._total / (sum(int(a.num_heads) for a in attentions) * self._watched)

    def _replace(
        self, layer: int, module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``module``'s attention should have given in place of ``output``, ``[tokens, heads * head_dim]``."""
        self._before_layer(layer)
        given = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))
        query, key, value = (t.view(len(self._positions), -1, module.head_size) for t in given[:3])
        self._computed[layer].append((self._at, self._positions, LayerKV(key.transpose(0, 1), value.transpose(0, 1))))
        window = self._paged.window(layer)
        first = 0 if window is None else max(0, int(self._at[0]) - window + 1)
        kv = self._visible(layer, first)
        return self._attend(module.impl, query, kv, first, window).to(output.dtype).view_as(output)

    def _visible(self, layer: int, first: int) -> LayerKV:
        """Return the KV of position ``first`` to the last that runs, in fp32: the pages', and over it what this computed."""
        end = int(self._at[-1]) + 1
        placed = self._paged.read(layer, self._pages.between(self._paged.group_of[layer], first, end))
        kv = LayerKV(*(t.new_empty(t.shape[0], end - first, t.shape[2], dtype=torch.float32) for t in placed))
        for whole, part in zip(kv, placed, strict=True):
            whole[:, : part.shape[1]] = part
        for at, positions, fresh in self._computed[layer]:
            before = int((at < first).sum())
            for whole, part in zip(kv, fresh, strict=True):
                whole[:, positions[before:] - first] = part[:, before:].float()
        return kv

    def _attend(self, impl: Any, query: torch.Tensor, kv: LayerKV, first: int, window: int | None) -> torch.Tensor:
        """Return the attention ``[tokens, heads, head_dim]`` of ``query``, shaped like it, in fp32; sum up the watched part.

        ``kv`` is that of the positions from ``first`` on; a token sees no more than ``window`` of them, itself included.
        """
        count, heads, dim = query.shape
        kv_heads, groups = kv.k.shape[0], heads // kv.k.shape[0]
        query = query.float().view(count, kv_heads, groups, dim).transpose(0, 1)
        out = query.new_empty(count, kv_heads, groups, dim)
        for begin in range(0, count, _BLOCK):
            part = slice(begin, begin + _BLOCK)
            at, seen = self._positions[part], int(self._at[part][-1]) + 1 - first
            shape = (kv_heads, len(at), groups, seen)
            scores = query[:, part].flatten(1, 2) @ kv.k[:, :seen].transpose(1, 2) * impl.scale
            if cap := getattr(impl, "logits_soft_cap", None):
                scores = (scores / cap).tanh() * cap
            keys = torch.arange(first, first + seen, device=at.device)
            hidden = keys > at[:, None]
            if window is not None:
                hidden |= keys <= at[:, None] - window
            scores = scores.view(shape).masked_fill(hidden[None, :, None], float("-inf"))
            if (sinks := getattr(impl, "sinks", None)) is not None:
                # One more score for each head, which takes its share of the attention and gives nothing.
                sinks = sinks.float().view(kv_heads, 1, groups, 1).expand(*shape[:3], 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., :seen]
            unwatched = int((self._at[part] < self._watch_from).sum())
            self._total[first : first + seen] += weights[:, unwatched:].sum((0, 1, 2))
            found = weights.flatten(1, 2) @ kv.v[:, :seen]
            out[part] = found.view(kv_heads, len(at), groups, dim).transpose(0, 1)
        return out
