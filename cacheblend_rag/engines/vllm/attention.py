"""Runs a pass of few tokens in vLLM with attention of our own, which can be watched: vLLM's shows no weights.

It writes nothing into the paged cache, so it may run tokens that have no pages yet, as the question has none while a blend runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.forward_context import set_forward_context

from cacheblend_rag.blending.target import Watch
from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.kernels import attention_replaced
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import Pages
from cacheblend_rag.store.kv import LayerKV

# Scores in memory at once. On a CPU as many as its caches hold: fresh memory for more costs as much as the products.
_SCORES = {"cpu": 1 << 19}
_MOST_SCORES = 1 << 24


class WatchedPass(Watch):
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
        """
        self._paged, self._ids, self._pages = paged, ids, pages
        self._before_layer, self._watch_from = before_layer, watch_from
        self._computed: list[list[tuple[torch.Tensor, torch.Tensor, LayerKV]]] = [[] for _ in paged.attention]
        self._total = torch.zeros(len(ids), device=paged.device)
        # In host memory, and on the device.
        self._at = self._positions = torch.empty(0, dtype=torch.int64)
        self._shares = torch.empty(0)
        self._watched = 0
        # For what a pass sees, from one position to another: where it is in each group's pages, and the kernel's sums.
        self._slots: dict[tuple[int, int, int], torch.Tensor] = {}
        self._sums: dict[tuple[int, int, int], torch.Tensor] = {}

    @torch.inference_mode()
    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``, ``[tokens]``, in host memory; every later call's lie behind them."""
        paged = self._paged
        self._at, self._positions = positions, sent(positions, paged.device)
        watched = positions >= self._watch_from
        self._shares = sent(watched.float(), paged.device)
        config = paged.config
        with (
            attention_replaced(paged.attention, self._attend_layer),
            set_forward_context(
                dict.fromkeys(paged.names),
                config,
                num_tokens=len(positions),
                slot_mapping={},  # without slots vLLM stores nothing
                skip_compiled=bool(config.compilation_config.pass_config.fuse_attn_quant),
            ),
        ):
            paged.run(self._ids[positions], self._positions)
        self._watched += int(watched.sum())

    def mean(self) -> torch.Tensor:
        """Attention to each token of the prompt, ``[prompt tokens]``, fp32, mean over layers, heads and watched tokens."""
        for (first, end, _), sums in self._sums.items():
            self._total[first:end] += sums.sum(0)
        self._sums.clear()
        return self._total / (len(self._paged.attention) * self._watched)

    def _attend_layer(
        self,
        layer: int,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: None,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Write the attention of ``query``, ``[tokens, heads, head_dim]``, to ``output`` and return it."""
        self._before_layer(layer)
        # Copies: compiled code uses the memory again.
        fresh = LayerKV(*(t.transpose(0, 1).clone() for t in (key, value)))
        self._computed[layer].append((self._at, self._positions, fresh))
        window = self._paged.window(layer)
        first = 0 if window is None else max(0, int(self._at[0]) - window + 1)
        kv, kernels = self._visible(layer, first), self._paged.kernels
        if kernels is None or not kernels.can_watch:
            found = self._attend(module.impl, query, kv, first, window)
            return output.copy_(found.view_as(output))
        kv_heads, seen = kv.k.shape[:2]
        where = first, first + seen, kv_heads
        if where not in self._sums:
            self._sums[where] = torch.zeros(kv_heads, seen, device=query.device)
        positions = self._positions - first if first else self._positions
        kernels.watch(module, query, kv, positions, self._shares, self._sums[where], output)
        return output

    def _visible(self, layer: int, first: int) -> LayerKV:
        """Return the KV of position ``first`` to the last that runs: the pages', and over it what this computed."""
        end = int(self._at[-1]) + 1
        where = self._paged.group_of[layer], first, end
        if where not in self._slots:
            self._slots[where] = sent(self._pages.between(*where), self._paged.device)
        kv = self._paged.read(layer, self._slots[where])
        if lacking := end - first - kv.k.shape[1]:
            kv = LayerKV(*(pad(t, (0, 0, 0, lacking)) for t in kv))
        for at, positions, fresh in self._computed[layer]:
            before = int((at < first).sum())
            own = positions[before:] - first
            for whole, part in zip(kv, fresh, strict=True):
                whole[:, own] = part[:, before:]
        return kv

    def _attend(self, impl: Any, query: torch.Tensor, kv: LayerKV, first: int, window: int | None) -> torch.Tensor:
        """Return the attention ``[tokens, heads, head_dim]`` of ``query``, shaped like it, in fp32; sum up the watched part.

        ``kv`` is that of the positions from ``first`` on; a token sees no more than ``window`` of them, itself included.
        """
        count, heads, dim = query.shape
        kv_heads, groups = kv.k.shape[0], heads // kv.k.shape[0]
        query = (query.float() * impl.scale).view(count, kv_heads, groups, dim).transpose(0, 1)
        out = query.new_empty(count, kv_heads, groups, dim)
        sinks = getattr(impl, "sinks", None)
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, 1, groups, 1)
        most = _SCORES.get(query.device.type, _MOST_SCORES)
        begin = 0
        while begin < count:
            part = slice(begin, begin + max(1, most // (groups * kv.k.shape[1])))
            begin = part.stop
            at, seen = self._positions[part], int(self._at[part][-1]) + 1 - first
            # All keys up to the first query's position are seen by all queries, but for those before a window.
            free = 0 if window is not None else int(self._at[part][0]) + 1 - first
            keys = torch.arange(first + free, first + seen, device=at.device)
            hidden = keys > at[:, None]
            if window is not None:
                hidden |= keys <= at[:, None] - window
            unwatched = int((self._at[part] < self._watch_from).sum())
            together = max(1, most // (len(at) * groups * seen))
            for head in range(0, kv_heads, together):
                own = slice(head, head + together)
                scores = query[own, part].flatten(1, 2) @ kv.k[own, :seen].transpose(1, 2).float()
                if cap := getattr(impl, "logits_soft_cap", None):
                    scores = (scores / cap).tanh() * cap
                scores = scores.view(-1, len(at), groups, seen)
                scores[..., free:].masked_fill_(hidden[:, None], float("-inf"))
                if sinks is not None:
                    # One more score for each head, which takes its share of the attention and gives nothing.
                    scores = torch.cat([scores, sinks[own].expand(*scores.shape[:3], 1)], dim=-1)
                weights = scores.softmax(-1)[..., :seen]
                self._total[first : first + seen].add_(weights[:, unwatched:].sum((0, 1, 2)), alpha=1 / heads)
                found = weights.flatten(1, 2) @ kv.v[own, :seen].float()
                out[part, own] = found.view(-1, len(at), groups, dim).transpose(0, 1)
        return out
