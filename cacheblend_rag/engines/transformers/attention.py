"""Computes attention for queries at given positions, without a mask of all queries by all keys.

The module registers an attention implementation with transformers. Outside a pass of the fusor, the implementation
calls transformers' own SDPA. Inside a pass, queries and visible keys are cut into rectangles. On a CPU, a rectangle
whose queries see all its keys needs no mask, and neither does a triangle of neighbouring positions (``is_causal``);
only the few keys among a block of scattered queries are masked. The parts are joined by their log-sum-exp, which is
exact up to rounding. On a GPU, a Triton kernel of this package computes all queries at once. If neither way works, and
on a CPU with a sliding window, queries are masked block by block, and each block reads only the keys between its first
and its last visible key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cacheblend_rag.engines.kernels.check import attention_works, shares_work

NAME = "cacheblend_sdpa"

# Queries per masked block: measured as fastest on a CPU; a GPU needs fewer, larger calls.
_BLOCK, _GPU_BLOCK = 64, 1024

QUERIES: ContextVar[Queries | None] = ContextVar("cacheblend_queries", default=None)
"""Queries of the scattered pass that is running; None outside such a pass."""


class Looks:
    """Sums, over layers, the attention weights of a scattered pass's queries to each key.

    Attributes:
        shares: Weight of each query in the sum, ``[queries]``, fp32, on the queries' device.
        total: Sums over layers, ``[kv_heads, keys]``, fp32; the sum over KV heads is the mean over heads. None before
            the first layer.
        layers: Number of added layers.
    """

    def __init__(self, shares: torch.Tensor):
        self.shares = shares
        self.total: torch.Tensor | None = None
        self.layers = 0

    def begin_layer(self, key: torch.Tensor) -> torch.Tensor:
        """Return the sums, to which the caller adds a layer with keys ``[kv_heads, keys, head_dim]``."""
        self.layers += 1
        if self.total is None:
            self.total = torch.zeros(key.shape[:2], device=key.device)
        return self.total

    def mean(self, tokens: int) -> torch.Tensor:
        """Return the mean over layers, ``[tokens]``; 0 for tokens that no query could see."""
        assert self.total is not None
        mean = self.total.sum(0)[:tokens] / self.layers
        return pad(mean, (0, tokens - len(mean)))


def weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    """Return one sequence's attention weights ``[heads, queries, keys]``, fp32, under a boolean or additive mask."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    return scores[0].softmax(-1)


class Queries:
    """Computes attention for queries of one sequence at ascending positions; a query sees keys up to its own position.

    Keys and values belong to the positions from 0 on.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        on_device: torch.Tensor | None = None,
        block: int | None = None,
        looks: Looks | None = None,
    ):
        """Describe the queries of a pass.

        Args:
            positions: ``[queries]``, in host memory, so that no code waits for a device.
            on_device: The positions on the queries' device; None if the queries are in host memory.
            block: Number of queries that are masked at once; None for the fastest number.
            looks: Sums to which the attention weights are added; None for no sums.
        """
        self._looks = looks
        self._at = positions.tolist()
        self._positions = positions if on_device is None else on_device
        self._on_cpu = self._positions.device.type == "cpu"
        self._block = block or (_BLOCK if self._on_cpu else _GPU_BLOCK)
        # A pass makes each mask once, for all layers; all masks together hold at most one block's queries by all keys.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the attention ``[queries, heads, value_dim]``.

        Args:
            query: ``[heads, queries, head_dim]``.
            key: ``[kv_heads, keys, head_dim]``; the keys reach at least to the last query's position.
            value: ``[kv_heads, keys, value_dim]``.
            scale: Factor of the scores; None is ``head_dim ** -0.5``.
            window: Maximum number of keys that a query sees, its own included; None for all.
        """
        kv_heads, groups, width = key.shape[0], query.shape[0] // key.shape[0], value.shape[2]
        if _kernel_serves(query, key, value):
            return self._attend_with_kernel(query, key, value, scale, window)
        self._look(query, key, scale, window)
        query = query.view(kv_heads, groups, *query.shape[1:])
        if window is not None and window > self._at[-1]:
            window = None
        in_parts = self._on_cpu and window is None and width <= key.shape[2]
        if in_parts and width < key.shape[2]:
            # MLA: the kernel that returns the log-sum-exp requires values as wide as keys.
            value = pad(value, (0, key.shape[2] - width))
        # The heads of a group read the same keys, through a stride of 0 instead of copies.
        key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
        if in_parts:
            out = _Parts(query, key, value, scale)
            self._add(out, 0, len(self._at), 0)
            return out.joined[..., :width].to(query.dtype).flatten(1, 2)
        if not self._on_cpu:  # GPU kernels are not known to support a stride of 0
            key, value = key.contiguous(), value.contiguous()
        return self._attend_masked(query, key, value, scale, window).flatten(1, 2)

    def _attend_with_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        from cacheblend_rag.engines.kernels.attention import add_shares, attend

        query, looks = query.transpose(0, 1), self._looks
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        scale = query.shape[2] ** -0.5 if scale is None else scale
        sums = looks is not None and shares_work(query.device, query.dtype, query.shape[1], *key.shape[::2])
        lse = torch.empty(query.shape[:2], device=query.device) if sums else None
        # The kernel treats a cache without pages as one page.
        attend(query, key[None], value[None], self._positions, None, out, scale, window=window, lse=lse)
        if looks is not None and lse is not None:
            add_shares(query, key, self._positions, looks.shares, lse, looks.begin_layer(key), scale, window)
        else:
            self._look(query.transpose(0, 1), key, scale, window)
        return out

    def _look(self, query: torch.Tensor, key: torch.Tensor, scale: float | None, window: int | None) -> None:
        if self._looks is None:
            return
        visible = self.visible(0, query.shape[1], 0, key.shape[1], window)
        found = weights(query[None], key[None], visible, scale)
        self._looks.begin_layer(key)[0] += self._looks.shares @ found.mean(0)

    def visible(self, begin: int, end: int, first: int, last: int, window: int | None = None) -> torch.Tensor:
        """Return which keys in ``[first, last)`` each query in ``[begin, end)`` sees, boolean, ``[queries, keys]``."""
        at = self._positions[begin:end, None]
        keys = torch.arange(first, last, device=at.device)
        return keys <= at if window is None else (keys <= at) & (keys > at - window)

    def _add(self, out: _Parts, begin: int, end: int, first: int) -> None:
        """Attend from the queries in ``[begin, end)`` to the keys from ``first`` on."""
        nearest, count = self._at[begin], end - begin
        if nearest > first:
            self._add(out, begin, end, nearest)
            out.add_seen_whole(begin, end, first, nearest)
        elif self._at[end - 1] - nearest == count - 1:
            out.set_causal(begin, end, first)
        elif count <= self._block:
            out.set_masked(begin, end, first, self._mask(begin, end, out.dtype))
        else:
            middle = begin + -(-count // (2 * self._block)) * self._block
            self._add(out, begin, middle, first)
            self._add(out, middle, end, first)

    def _mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        if (begin, end) not in self._masks:
            visible = self.visible(begin, end, self._at[begin], self._at[end - 1] + 1)
            self._masks[begin, end] = additive(visible, dtype)
        return self._masks[begin, end]

    def _attend_masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        count = len(self._at)
        # The layout that the model expects, so that the end needs no copy.
        out = query.new_empty(count, *query.shape[:2], value.shape[3])
        for begin in range(0, count, self._block):
            end = min(begin + self._block, count)
            first = 0 if window is None else max(0, self._at[begin] + 1 - window)
            last = self._at[end - 1] + 1
            part = scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, first:last],
                value[:, :, first:last],
                attn_mask=additive(self.visible(begin, end, first, last, window), query.dtype),
                scale=scale,
            )
            out[begin:end] = part.permute(2, 0, 1, 3)
        return out


class _Parts:
    """Joins the attention of queries to one part of the keys after another.

    Attributes:
        joined: Attention so far, ``[queries, kv_heads, groups, head_dim]``, at least fp32.
        dtype: Dtype of queries, keys and values.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None):
        """Take queries, keys and values, each ``[kv_heads, groups, tokens, head_dim]``."""
        self._query, self._key, self._value, self._scale = query, key, value, scale
        self.dtype = query.dtype
        kv_heads, self._groups, count, dim = query.shape
        # One matrix per KV head, group by group within a query: keys that all queries see need no loop over heads.
        self._folded = query.transpose(1, 2).reshape(kv_heads, 1, count * self._groups, dim)
        wide = torch.promote_types(query.dtype, torch.float32)
        self.joined = query.new_empty(count, kv_heads, self._groups, dim, dtype=wide)
        self._lse = query.new_empty(count, kv_heads, self._groups, dtype=wide)

    def set_causal(self, begin: int, end: int, first: int) -> None:
        """Attend from queries at neighbouring positions to the keys at these positions, which start at ``first``."""
        self._set(begin, end, *self._attend(self._query[:, :, begin:end], first, first + end - begin, causal=True))

    def set_masked(self, begin: int, end: int, first: int, mask: torch.Tensor) -> None:
        """Attend to the keys from ``first`` on under an additive ``mask``, ``[queries, keys]``."""
        self._set(begin, end, *self._attend(self._query[:, :, begin:end], first, first + mask.shape[1], mask))

    def add_seen_whole(self, begin: int, end: int, first: int, last: int) -> None:
        """Add the keys in ``[first, last)``, all of which every query in ``[begin, end)`` sees."""
        part, lse = self._attend(self._folded[:, :, begin * self._groups : end * self._groups], first, last)
        split = (self._query.shape[0], end - begin, self._groups)
        part, lse = part.view(*split, part.shape[3]).transpose(0, 1), lse.view(split).transpose(0, 1)
        joined, joined_lse = self.joined[begin:end], self._lse[begin:end]
        joined.lerp_(part.to(joined.dtype), torch.sigmoid(lse - joined_lse)[..., None])
        torch.logaddexp(joined_lse, lse, out=joined_lse)

    def _set(self, begin: int, end: int, part: torch.Tensor, lse: torch.Tensor) -> None:
        self.joined[begin:end] = part.permute(2, 0, 1, 3)
        self._lse[begin:end] = lse.permute(2, 0, 1)

    def _attend(
        self, query: torch.Tensor, first: int, last: int, mask: torch.Tensor | None = None, causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = query.shape[1]
        # scaled_dot_product_attention calls this operator on a CPU; a direct call also returns the log-sum-exp.
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            self._key[:, :heads, first:last],
            self._value[:, :heads, first:last],
            is_causal=causal,
            attn_mask=mask,
            scale=self._scale,
        )
        return part, lse


def _kernel_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    same = query.dtype == key.dtype == value.dtype and key.shape == value.shape and query.stride(2) == 1
    return same and attention_works(query.device, query.dtype, query.shape[0], key.shape[0], key.shape[2])


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: eager attention needs one, and SDPA would convert booleans in every call."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


@contextmanager
def scattered(
    positions: torch.Tensor, on_device: torch.Tensor | None = None, looks: Looks | None = None
) -> Iterator[None]:
    """Run forwards in the context with queries at ascending ``positions`` and without a mask; see :class:`Queries`.

    Eager attention adds nothing to ``looks``.
    """
    token = QUERIES.set(Queries(positions, on_device, looks=looks))
    try:
        yield
    finally:
        QUERIES.reset(token)


def _mask(*, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return the mask of a kind of layer; in a scattered pass an empty tensor whose shape holds the sliding window."""
    if QUERIES.get() is None:
        mask: torch.Tensor | None = sdpa_mask(local_size=local_size, **kwargs)
        return mask
    # Not every model passes the window to its attention, but all pass the mask. Reading a shape waits for no device.
    return None if local_size is None else torch.empty(1, 1, 0, local_size)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, with the arguments that transformers passes."""
    queries = QUERIES.get()
    if queries is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window = None if attention_mask is None else attention_mask.shape[3]
    return queries.attend(query[0], key[0], value[0], scaling, window)[None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
