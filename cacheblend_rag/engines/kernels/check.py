"""Tests each kernel once per shape of heads, before a blend needs the kernel: it must run here and agree with torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.rope import Move, Rotation, moved
from cacheblend_rag.store.codec import coded, numbers
from cacheblend_rag.store.kv import ChunkKV, LayerKV

_log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
_PAGES, _SIZE, _TOKENS = 8, 16, 100


def placing_works(device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int) -> bool:
    """Return whether the kernel that places KV works for this shape on ``device``; a failure is logged."""
    return _at_home(device, dtype) and _passes(_placing_differs, device, dtype, kv_heads, head_dim)


def rows_work(device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int) -> bool:
    """Return whether the kernel places rows (:func:`~cacheblend_rag.store.codec.coded`); a failure is logged."""
    return _at_home(device, dtype) and _passes(_rows_differ, device, dtype, kv_heads, head_dim)


def can_place(stored: StoredLayers, device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int) -> bool:
    """Return whether KV can be placed in the form in which it is stored, provided that :func:`placing_works`."""
    if stored.spans and stored.dtype != dtype:
        return False
    return not stored.in_rows or rows_work(device, dtype, kv_heads, head_dim)


def attention_works(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, sinks: bool = False
) -> bool:
    """Return whether the kernel for scattered queries' attention works for this shape on ``device``; logs a failure."""
    return _at_home(device, dtype) and _passes(_attention_differs, device, dtype, kv_heads, head_dim, heads, sinks)


def shares_work(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether the kernel that sums attention weights works for this shape on ``device``; a failure is logged."""
    return _at_home(device, dtype) and _passes(_shares_differ, device, dtype, kv_heads, head_dim, heads)


def _at_home(device: torch.device, dtype: torch.dtype) -> bool:
    # For tests, Triton's interpreter runs the kernels on a CPU.
    where = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    return device.type == where and dtype in _TOLERANCE and find_spec("triton") is not None


@cache
def _passes(
    differs: Callable[..., str | None], device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, *more: int
) -> bool:
    try:
        failure = differs(_Trial(device, dtype, kv_heads, dim), *more)
    except Exception as error:  # no compiler, or a tile too large for this device: the engines then use torch
        failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        _log.warning("Blends do without a kernel for the GPU, more slowly: %s", failure)
    return failure is None


class _Trial:
    """Holds random KV, and an empty cache of shuffled pages for the KV."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int):
        self._generator, self._device, self._dtype = torch.Generator().manual_seed(0), device, dtype
        self.layers = [self._pages(kv_heads, dim) for _ in range(2)]
        self.keys, self.values = self.layers[0]
        self.kv = LayerKV(self.random(kv_heads, _TOKENS, dim), self.random(kv_heads, _TOKENS, dim))
        self.table = torch.randperm(_PAGES, generator=self._generator).to(device, torch.int32)
        self.at = torch.arange(_TOKENS, device=device)
        self.pages, self.rows = self.table[self.at // _SIZE].long(), self.at % _SIZE
        self.slots = self.pages * _SIZE + self.rows
        angles = self.random(_TOKENS - 10, dim // 2).float()
        self.move = Move(Rotation(angles.cos(), angles.sin()), "half", 10)

    def _pages(self, kv_heads: int, dim: int) -> LayerKV:
        cache = torch.zeros(_PAGES, _SIZE, kv_heads, 2 * dim, dtype=self._dtype, device=self._device).transpose(1, 2)
        return LayerKV(cache[..., :dim], cache[..., dim:])

    def placed(self, layer: LayerKV, want: LayerKV) -> bool:
        """Return whether ``layer`` holds ``want`` at the tokens' slots."""
        eps = 2 * torch.finfo(want.k.dtype).eps
        return all(
            torch.allclose(got[self.pages, :, self.rows].transpose(0, 1), side, rtol=eps)
            for got, side in zip(layer, want, strict=True)
        )

    def places(self, stored: list[LayerKV], numbers: list[LayerKV]) -> bool:
        """Return whether one launch places two layers correctly; True if the caches' layout rules out one launch."""
        from cacheblend_rag.engines.kernels.place import Layers, TokenTable, place_layers

        if (layers := Layers.of(self.layers)) is None:
            return True
        table = TokenTable(torch.zeros_like(self.at), self.at, torch.full_like(self.at, _TOKENS), self.slots)
        place_layers(torch.cat([side.reshape(-1) for layer in stored for side in layer]), table, self.move, layers)
        wanted = [moved(kv, self.move) for kv in numbers]
        return all(self.placed(*both) for both in zip(self.layers, wanted, strict=True))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def queries(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random queries, and their positions."""
        positions = self.at[::3].contiguous()
        return self.random(len(positions), heads, self.kv.k.shape[2]), positions

    def weights(self, query: torch.Tensor, positions: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the attention weights of ``query``, ``[heads, queries, tokens]``, in fp32."""
        heads, (kv_heads, _, dim) = query.shape[1], self.kv.k.shape
        k = self.kv.k.float().repeat_interleave(heads // kv_heads, 0)
        scores = query.float().transpose(0, 1) @ k.mT * dim**-0.5
        scores = scores.masked_fill(self.at > positions[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(positions), 1)], -1)
        weights: torch.Tensor = scores.softmax(-1)[..., :_TOKENS]
        return weights


def _placing_differs(trial: _Trial) -> str | None:
    from cacheblend_rag.engines.kernels.place import place

    place(trial.kv, trial.move, trial.slots, trial.keys, trial.values)
    if not trial.placed(trial.layers[0], moved(trial.kv, trial.move)):
        return "it does not place keys and values as torch does"
    trial.keys.zero_()
    # An entry of two layers, of which the second is the negative of the first.
    entry = [trial.kv, LayerKV(-trial.kv.k, -trial.kv.v)]
    return None if trial.places(entry, entry) else "it does not place several layers as torch does"


def _rows_differ(trial: _Trial) -> str | None:
    rows = coded(ChunkKV([trial.kv, LayerKV(-trial.kv.k, -trial.kv.v)], 0))
    if rows is None:
        return "its heads cannot be held in rows"
    stored = [LayerKV(*(side.to(trial.at.device) for side in layer)) for layer in rows]
    decoded = [numbers(layer, trial.kv.k.dtype) for layer in stored]
    return None if trial.places(stored, decoded) else "it does not place rows as torch does"


def _attention_differs(trial: _Trial, heads: int, with_sinks: bool) -> str | None:
    from cacheblend_rag.engines.kernels.attention import attend

    for side, memory in zip(trial.kv, (trial.keys, trial.values), strict=True):
        memory[trial.pages, :, trial.rows] = side.transpose(0, 1)
    query, positions = trial.queries(heads)
    out = torch.empty_like(query)
    sinks = trial.random(heads) if with_sinks else None
    attend(query, trial.keys, trial.values, positions, trial.table, out, query.shape[2] ** -0.5, sinks=sinks)
    weights = trial.weights(query, positions, sinks)
    v = trial.kv.v.float().repeat_interleave(heads // len(trial.kv.v), 0)
    error = float((out.float() - (weights @ v).transpose(0, 1)).abs().max())
    return None if error < _TOLERANCE[query.dtype] else f"its attention differs from torch's by {error:.2g}"


def _shares_differ(trial: _Trial, heads: int) -> str | None:
    from cacheblend_rag.engines.kernels.attention import add_shares, attend

    query, positions = trial.queries(heads)
    k, v = trial.kv
    lse, total = (torch.zeros(shape, device=k.device) for shape in ((len(positions), heads), k.shape[:2]))
    shares = torch.ones_like(lse[:, 0])
    scale = query.shape[2] ** -0.5
    attend(query, k[None], v[None], positions, None, torch.empty_like(query), scale, lse=lse)
    add_shares(query, k, positions, shares, lse, total, scale)
    want = trial.weights(query, positions, None).mean(0).sum(0)
    error = float((total.sum(0) - want).abs().max() / want.max())
    return None if error < _TOLERANCE[query.dtype] else f"its sums of weights differ from torch's by {error:.2g}"
