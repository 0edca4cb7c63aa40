"""Computes attention for queries at given positions, without a mask of all queries by all keys.

Registered with transformers as an attention implementation; outside a pass of the fusor it is transformers' own SDPA. Inside
one, queries and the keys they see are cut into rectangles. On a CPU a rectangle that its queries see whole needs no mask, and
neither does a triangle of neighbouring positions (``is_causal``); only the few keys that stand among a block of scattered
queries are masked. The parts are joined by their log-sum-exp, which is exact up to rounding. On a GPU a kernel of our own takes
all queries at once. Where neither can, and on a CPU where a sliding window hides old keys, queries are masked block by block, and
each block reads only the keys between its first and its last visible one.
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

# Queries per masked block: measured best on a CPU (lab/benchmarks/attention_blocks.py); a GPU wants fewer, larger calls.
_BLOCK, _GPU_BLOCK = 64, 1024

QUERIES: ContextVar[Queries | None] = ContextVar("cacheblendQUERIES", default=None)
"""Of the scattered pass that runs, if one does."""


class Looks:
    """Adds up how much a scattered pass's queries attend to each key, over layers.

    Attributes:
        shares: ``[queries]``, fp32, where they are: how much each counts.
        total: ``[kv_heads, keys]``, fp32: the sums; over heads they are means. None before the first layer.
        layers: How many have been added.
    """

    def __init__(self, shares: torch.Tensor):
        self.shares = shares
        self.total: torch.Tensor | None = None
        self.layers = 0

    def begin_layer(self, key: torch.Tensor) -> torch.Tensor:
        """Return the sums that a layer with keys ``[kv_heads, keys, head_dim]`` adds to."""
        self.layers += 1
        if self.total is None:
            self.total = torch.zeros(key.shape[:2], device=key.device)
        return self.total

    def mean(self, tokens: int) -> torch.Tensor:
        """Return the mean over layers, ``[tokens]``; 0 for those that no query could see."""
        assert self.total is not None
        mean = self.total.sum(0)[:tokens] / self.layers
        return pad(mean, (0, tokens - len(mean)))


_looks: ContextVar[Looks | None] = ContextVar("cacheblend_looks", default=None)


@contextmanager
def looking(looks: Looks | None) -> Iterator[None]:
    """Let a scattered pass add to ``looks``, if there are any. Models that need eager attention do not."""
    token = _looks.set(looks)
    try:
        yield
    finally:
        _looks.reset(token)


def weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    """Return the attention weights ``[heads, queries, keys]``, in fp32, of one sequence under a mask of either kind."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    return scores[0].softmax(-1)


class Queries:
    """Queries of one sequence at ascending positions; each sees the keys at positions up to its own.

    Keys and values are those of the positions from 0 on.
    """

    def __init__(self, positions: torch.Tensor, on_device: torch.Tensor | None = None, block: int | None = None):
        """Describe the queries of a pass.

        Args:
            positions: ``[queries]``, in host memory: to read them from a device would wait for it.
            on_device: The same where the queries are; None if that is here.
            block: How many queries are masked at once; None for what is fast.
        """
        self._at = positions.tolist()
        self._positions = positions if on_device is None else on_device
        self._on_cpu = self._positions.device.type == "cpu"
        self._block = block or (_BLOCK if self._on_cpu else _GPU_BLOCK)
        # A pass makes each mask once, for all layers: together they hold one block's queries by all keys at the most.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        looks: Looks | None = None,
    ) -> torch.Tensor:
        """Return the attention ``[queries, heads, value_dim]``.

        Args:
            query: ``[heads, queries, head_dim]``.
            key: ``[kv_heads, keys, head_dim]``; the keys reach at least to the last query's position.
            value: ``[kv_heads, keys, value_dim]``.
            scale: Of the scores; None is ``head_dim ** -0.5``.
            window: How many keys a query sees at the most, its own included; None for all.
            looks: What the weights are added to; None for nothing.
        """
        kv_heads, groups, width = key.shape[0], query.shape[0] // key.shape[0], value.shape[2]
        if _kernel_serves(query, key, value):
            return self._attend_with_kernel(query, key, value, scale, window, looks)
        if looks is not None:
            self._look(looks, query, key, scale, window)
        query = query.view(kv_heads, groups, *query.shape[1:])
        if window is not None and window > self._at[-1]:
            window = None
        in_parts = self._on_cpu and window is None and width <= key.shape[2]
        if in_parts and width < key.shape[2]:
            # MLA: the kernel that returns the log-sum-exp wants values as wide as keys.
            value = pad(value, (0, key.shape[2] - width))
        # The heads of a group read the same keys: a stride of 0 instead of copies.
        key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
        if in_parts:
            out = _Parts(query, key, value, scale)
            self._add(out, 0, len(self._at), 0)
            return out.joined[..., :width].to(query.dtype).flatten(1, 2)
        if not self._on_cpu:  # its kernels are not known to take a stride of 0
            key, value = key.contiguous(), value.contiguous()
        return self._attend_masked(query, key, value, scale, window).flatten(1, 2)

    def _attend_with_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        looks: Looks | None,
    ) -> torch.Tensor:
        from cacheblend_rag.engines.kernels.attention import add_shares, attend

        query = query.transpose(0, 1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        scale = query.shape[2] ** -0.5 if scale is None else scale
        sums = looks is not None and shares_work(query.device, query.dtype, query.shape[1], *key.shape[::2])
        lse = torch.empty(query.shape[:2], device=query.device) if sums else None
        # A cache without pages is one page.
        attend(query, key[None], value[None], self._positions, None, out, scale, window=window, lse=lse)
        if looks is not None and lse is not None:
            add_shares(query, key, self._positions, looks.shares, lse, looks.begin_layer(key), scale, window)
        elif looks is not None:
            self._look(looks, query.transpose(0, 1), key, scale, window)
        return out

    def _look(
        self, looks: Looks, query: torch.Tensor, key: torch.Tensor, scale: float | None, window: int | None
    ) -> None:
        visible = self.visible(0, query.shape[1], 0, key.shape[1], window)
        found = weights(query[None], key[None], visible, scale)
        looks.begin_layer(key)[0] += looks.shares @ found.mean(0)

    def visible(self, begin: int, end: int, first: int, last: int, window: int | None = None) -> torch.Tensor:
        """Return which of the keys from ``first`` to before ``last`` the queries ``begin`` to before ``end`` see.

        Returns:
            True where they do, ``[queries, keys]``.
        """
        at = self._positions[begin:end, None]
        keys = torch.arange(first, last, device=at.device)
        return keys <= at if window is None else (keys <= at) & (keys > at - window)

    def _add(self, out: _Parts, begin: int, end: int, first: int) -> None:
        """Attend from the queries ``begin`` to before ``end`` to the keys from ``first`` on."""
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
        # Laid out as the model wants it back: no copy at the end.
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
    """The attention of queries to some keys, to which others are added.

    Attributes:
        joined: Attention so far, ``[queries, kv_heads, groups, head_dim]``, at least fp32.
        dtype: Of queries, keys and values.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None):
        """Take queries ``[kv_heads, groups, queries, head_dim]``, and keys and values likewise."""
        self._query, self._key, self._value, self._scale = query, key, value, scale
        self.dtype = query.dtype
        kv_heads, self._groups, count, dim = query.shape
        # One matrix per KV head, group by group within a query: its product with keys that all see needs no loop over heads.
        self._folded = query.transpose(1, 2).reshape(kv_heads, 1, count * self._groups, dim)
        wide = torch.promote_types(query.dtype, torch.float32)
        self.joined = query.new_empty(count, kv_heads, self._groups, dim, dtype=wide)
        self._lse = query.new_empty(count, kv_heads, self._groups, dtype=wide)

    def set_causal(self, begin: int, end: int, first: int) -> None:
        """Attend from neighbouring queries to the keys at their own positions, the first of which is ``first``."""
        self._set(begin, end, *self._attend(self._query[:, :, begin:end], first, first + end - begin, causal=True))

    def set_masked(self, begin: int, end: int, first: int, mask: torch.Tensor) -> None:
        """Attend to the keys from ``first`` on under an additive ``mask``, ``[queries, keys]``."""
        self._set(begin, end, *self._attend(self._query[:, :, begin:end], first, first + mask.shape[1], mask))

    def add_seen_whole(self, begin: int, end: int, first: int, last: int) -> None:
        """Add the keys from ``first`` to before ``last``, which all these queries see."""
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
        # What scaled_dot_product_attention runs on a CPU; called by its name since it also returns the log-sum-exp.
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
    """Return the mask to add to scores: eager attention takes no other, and SDPA would make one of booleans in every call."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


@contextmanager
def scattered(positions: torch.Tensor, on_device: torch.Tensor | None = None) -> Iterator[None]:
    """Run a forward whose queries stand at ascending positions of one sequence, without a mask; see :class:`Queries`."""
    token = QUERIES.set(Queries(positions, on_device))
    try:
        yield
    finally:
        QUERIES.reset(token)


def _mask(*, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return the model's mask for a kind of layer; in a scattered pass nothing but how far a sliding window reaches."""
    if QUERIES.get() is None:
        mask: torch.Tensor | None = sdpa_mask(local_size=local_size, **kwargs)
        return mask
    # Not every model tells its attention the window, but all hand on the mask. Its shape says it: no device is waited for.
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
    """Compute a layer's attention, as transformers calls it."""
    queries = QUERIES.get()
    if queries is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window = None if attention_mask is None else attention_mask.shape[3]
    return queries.attend(query[0], key[0], value[0], scaling, window, _looks.get())[None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
