"""Observes the attention weights of a transformers model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from cacheblend_rag.engines.transformers.attention import NAME, QUERIES, attention, weights


@contextmanager
def watched(watcher: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Call ``watcher(layer, weights)`` with every layer's attention weights, ``[heads, queries, keys]`` in fp32.

    Use passes of few queries (a question): the weights of a whole prompt would not fit into memory. Models that need
    eager attention are not observed. Passes of other threads are observed, too.
    """

    def shown(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        mask, queries = attention_mask, QUERIES.get()
        if queries is not None:
            window = None if attention_mask is None else attention_mask.shape[3]
            mask = queries.visible(0, query.shape[2], 0, key.shape[2], window)
        watcher(int(module.layer_idx), weights(query, key, mask, scaling))  # type: ignore[arg-type]
        return attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(NAME, shown)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attention)
