"""Computes a question's attention in vLLM's place, and sums up what is attended to: vLLM's own shows no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cacheblend_rag.engines.vllm.kernels import Kernels, attention_replaced
from cacheblend_rag.store.kv import LayerKV

# Scores in memory at once. On a CPU as many as its caches hold: fresh memory for more costs as much as the products.
_SCORES = {"cpu": 1 << 19}
_MOST_SCORES = 1 << 24


def watching(
    layers: Sequence[Any],
    kernels: Kernels | None,
    read: Callable[[int], LayerKV],
    positions: torch.Tensor,
    shares: torch.Tensor,
    sums: torch.Tensor,
) -> AbstractContextManager[None]:
    """Replace the attention of ``layers``, by ``kernels`` where these can, over what ``read`` copies of a layer's KV.

    What a pass computes itself goes over the copy. The rest is as for :func:`attend_and_sum`; ``sums`` is ``[kv_heads, keys]``.
    """

    def watch(
        index: int, layer: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any
    ) -> torch.Tensor:
        kv, output = read(index), given["output"]
        for whole, fresh in zip(kv, (k, v), strict=True):
            whole[:, positions] = fresh.transpose(0, 1)
        if kernels is None or not kernels.can_watch:
            output.copy_(attend_and_sum(layer, query, kv, positions, shares, sums).view_as(output))
        else:
            kernels.watch(layer, query, kv, positions, shares, sums, output)
        return output  # type: ignore[no-any-return]

    return attention_replaced(layers, watch)


def attend_and_sum(
    layer: Any, query: torch.Tensor, kv: LayerKV, positions: torch.Tensor, shares: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """Return the attention of ``query``, ``[tokens, heads, head_dim]``, shaped like it, in fp32.

    Args:
        layer: vLLM's attention layer, with its window, soft cap and sinks.
        query: The tokens' own.
        kv: ``[kv_heads, keys, head_dim]``, of the sequence's positions from 0 on.
        positions: Of the tokens, ``[tokens]``, ascending.
        shares: ``[tokens]``, fp32: how much each token's attention counts.
        sums: ``[1, keys]`` or more rows, fp32: the first gets the weights, the mean over heads.
    """
    impl, window = layer.impl, layer.sliding_window
    count, heads, dim = query.shape
    kv_heads, groups = kv.k.shape[0], heads // kv.k.shape[0]
    query = (query.float() * impl.scale).view(count, kv_heads, groups, dim).transpose(0, 1)
    out = query.new_empty(count, kv_heads, groups, dim)
    sinks = getattr(impl, "sinks", None)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, 1, groups, 1)
    most = _SCORES.get(query.device.type, _MOST_SCORES)
    begin, longest = 0, int(positions[-1]) + 1
    while begin < count:
        part = slice(begin, begin + max(1, most // (groups * longest)))
        begin, at = part.stop, positions[part]
        # Keys before the first query's window, and behind the last query, are seen by none.
        first, end = 0 if window is None else max(0, int(at[0]) - window + 1), int(at[-1]) + 1
        free = 0 if window is not None else int(at[0]) + 1  # seen by all of them
        keys = torch.arange(first + free, end, device=at.device)
        hidden = keys > at[:, None]
        if window is not None:
            hidden |= keys <= at[:, None] - window
        together = max(1, most // (len(at) * groups * (end - first)))
        for head in range(0, kv_heads, together):
            own = slice(head, head + together)
            scores = query[own, part].flatten(1, 2) @ kv.k[own, first:end].transpose(1, 2).float()
            if cap := getattr(impl, "logits_soft_cap", None):
                scores = (scores / cap).tanh() * cap
            scores = scores.view(-1, len(at), groups, end - first)
            scores[..., free:].masked_fill_(hidden[:, None], float("-inf"))
            if sinks is not None:
                # One more score for each head, which takes its share of the attention and gives nothing.
                scores = torch.cat([scores, sinks[own].expand(*scores.shape[:3], 1)], dim=-1)
            weights = scores.softmax(-1)[..., : end - first]
            sums[0, first:end].add_(shares[part] @ weights.sum((0, 2)), alpha=1 / heads)
            found = weights.flatten(1, 2) @ kv.v[own, first:end].float()
            out[part, own] = found.view(-1, len(at), groups, dim).transpose(0, 1)
    return out.view(count, heads, dim)
