"""Runs chunks as one sequence in which each chunk sees only the header and itself, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from cacheblend_rag.engines.transformers.attention import QUERIES, Queries, additive


class ChunkRows(Queries):
    """Computes the attention of a sequence made of a header and chunks, where every chunk is directly behind the header.

    Attention alone is computed in one padded row per chunk, each with a copy of the header.

    Attributes:
        positions: Position of each token of the sequence, ``[tokens]``.
    """

    def __init__(self, header: int, lengths: Sequence[int], device: torch.device):
        """Set the number of tokens of the header and of each chunk."""
        ends = torch.tensor([header, *lengths]).cumsum(0).tolist()
        chunks = [torch.arange(*ends[i : i + 2]) for i in range(len(lengths))]
        first = torch.arange(header)
        row = pad_sequence([torch.cat([first, chunk]) for chunk in chunks], batch_first=True)
        width = row.shape[1]
        place = [first, *(number * width + header + torch.arange(len(chunk)) for number, chunk in enumerate(chunks))]
        owner = [torch.full((len(chunk),), number) for number, chunk in enumerate([first, *chunks])]
        positions = torch.cat([first, *(header + torch.arange(length) for length in lengths)])
        self._row, self._place, self._owner = row.to(device), torch.cat(place).to(device), torch.cat(owner).to(device)
        self.positions = positions.to(device)

    def related(self) -> torch.Tensor:
        """Return which tokens are in the header or in one's own chunk, ``[tokens, tokens]``."""
        return (self._owner == 0) | (self._owner == self._owner[:, None])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention ``[tokens, heads, value_dim]``; the arguments are those of :meth:`Queries.attend`."""
        groups = query.shape[0] // key.shape[0]
        rows = (part[:, self._row].transpose(0, 1) for part in (query, key, value))
        query, key, value = rows
        if groups > 1:
            key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        mask, width = None, self._row.shape[1]
        if window is not None and window < width:
            at = torch.arange(width, device=query.device)
            mask = additive((at <= at[:, None]) & (at > at[:, None] - window), query.dtype)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)[self._place]

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Run forwards in the context with this attention, unless the model's attention is eager."""
        token = QUERIES.set(self)
        try:
            yield
        finally:
            QUERIES.reset(token)


class FreshKV(DynamicCache):  # type: ignore[misc]
    """Keeps the KV that a pass without a prefix computes.

    Attributes:
        found: Keys and values of each layer, as the layer caches them, by the layer's number.
    """

    def __init__(self) -> None:
        """Begin without KV."""
        super().__init__()
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's KV, unless the layer has been computed before; return the arguments."""
        self.found.setdefault(layer_idx, (key_states, value_states))
        return key_states, value_states
