"""Moves keys to another position: one fp32 rotation by the model's own RoPE table.

The layout of the rotation (which dimensions pair up, how many rotate, which table a layer uses) is not derived from the
model's name but measured. The same tokens are run at two offsets, and the layout that turns one set of keys into the
other is the model's layout. A model without such a layout is not blended. See docs/internals/blending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cacheblend_rag.store.kv import ChunkKV, LayerKV

CosSin = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps positions ``[n]`` to the model's own fp32 cos and sin, each ``[n, rotated_dims]``, scaling included."""

Layout = Literal["half", "interleaved", "none"]

# Relative error up to which a layout explains a model's keys: the arithmetic noise of a deep forward in that dtype.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 8e-2}

# Runs that measure a model's rotation: this many tokens, from position 0 on and from this offset on.
_RUN_TOKENS, _RUN_BY = 16, 29


class NotRotaryError(Exception):
    """Says that the model's keys do not move between positions by any known rotation."""


@dataclass(frozen=True)
class Rotation:
    """Turns keys by one RoPE table to target positions: fp32 cos and sin, each ``[tokens, rotated_dims / 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Move:
    """Says how the keys of one layer move to their positions: by rotation of the tokens from ``first`` on."""

    rotation: Rotation
    layout: Layout
    first: int


class Rope:
    """Holds the rotations of a whole model: a table and a layout for each layer."""

    def __init__(self, tables: Sequence[CosSin], table_of_layer: Sequence[int], layout_of_layer: Sequence[Layout]):
        """Store the distinct tables, and for each layer which table and which layout it uses."""
        self._tables = tuple(tables)
        self.table_of_layer = tuple(table_of_layer)
        self.layout_of_layer = tuple(layout_of_layer)
        self._columns: dict[int, slice] = {}  # by table; computed at first use, since it waits for the device

    def rotations(self, source: torch.Tensor, target: torch.Tensor) -> list[Rotation]:
        """Return one delta rotation per table, for all layers that use the table.

        The rotation turns keys computed at the positions ``source``, ``[tokens]``, to the positions ``target``,
        ``[tokens]``.
        """
        for index, table in enumerate(self._tables):
            if index not in self._columns:
                self._columns[index] = _distinct_columns(table, source.device)
        return [_delta(table, self._columns[index], source, target) for index, table in enumerate(self._tables)]

    def move(self, layer: int, rotations: Sequence[Rotation], first: int = 0) -> Move | None:
        """Return the move of the keys of ``layer``, from token ``first`` on; None if the keys have no positions."""
        layout = self.layout_of_layer[layer]
        return None if layout == "none" else Move(rotations[self.table_of_layer[layer]], layout, first)

    def rotate(self, layer: int, k: torch.Tensor, rotations: Sequence[Rotation]) -> torch.Tensor:
        """Return the keys of ``layer``, ``[kv_heads, tokens, head_dim]``, moved in fp32, in the dtype of ``k``."""
        move = self.move(layer, rotations)
        return k if move is None else apply_rotation(k, move.rotation, move.layout)


def moved(kv: LayerKV, move: Move | None) -> LayerKV:
    """Return ``kv``, ``[kv_heads, tokens, head_dim]``, with its keys moved."""
    return kv if move is None else LayerKV(apply_rotation(kv.k, move.rotation, move.layout, move.first), kv.v)


def _distinct_columns(table: CosSin, device: torch.device) -> slice:
    """Return the ``rotated_dims / 2`` distinct columns of a table that repeats each, side by side or pairwise."""
    cos, _ = table(torch.arange(1, 8, device=device))  # at position 0 all columns are alike
    half = cos.shape[-1] // 2
    return slice(0, half) if torch.equal(cos[:, :half], cos[:, half:]) else slice(0, None, 2)


def _delta(table: CosSin, columns: slice, source: torch.Tensor, target: torch.Tensor) -> Rotation:
    (cos_o, cos_n), (sin_o, sin_n) = (x[:, columns].chunk(2) for x in table(torch.cat([source, target])))
    # YaRN scales cos and sin: dividing by the squared norm leaves a pure rotation.
    norm = cos_o.square() + sin_o.square()
    return Rotation((cos_n * cos_o + sin_n * sin_o) / norm, (sin_n * cos_o - cos_n * sin_o) / norm)


def apply_rotation(k: torch.Tensor, rotation: Rotation, layout: Layout, first: int = 0) -> torch.Tensor:
    """Return a copy of ``k``, ``[..., tokens, head_dim]``, whose tokens from ``first`` on are rotated, in fp32.

    Dimensions beyond the rotated ones pass through.
    """
    half = rotation.cos.shape[-1]
    out = k.clone()
    if layout == "half":
        left, right = slice(0, half), slice(half, 2 * half)
    else:
        left, right = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = k[..., first:, left].float(), k[..., first:, right].float()
    out[..., first:, left] = a * rotation.cos - b * rotation.sin
    out[..., first:, right] = b * rotation.cos + a * rotation.sin
    return out


def two_runs(
    full_prefill: Callable[[list[int], int], tuple[torch.Tensor, ChunkKV]], vocab_size: int
) -> list[tuple[LayerKV, ...]]:
    """Run the same random tokens at two offsets by :meth:`GateSubject.full_prefill`; return the layers of each run."""
    ids = torch.randint(0, vocab_size, (_RUN_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    return [full_prefill(ids, offset)[1].layers for offset in (0, _RUN_BY)]


def rope_of_runs(tables: Sequence[CosSin], runs: Sequence[Sequence[LayerKV]]) -> Rope:
    """Return the rotation from the keys of the first of :func:`two_runs` to the second; see :func:`detect_rope`."""
    old, new = ([layer.k for layer in run] for run in runs)
    source = torch.arange(_RUN_TOKENS, device=old[0].device)
    return detect_rope(tables, old, new, source, source + _RUN_BY)


def detect_rope(
    tables: Sequence[CosSin],
    keys_at_source: Sequence[torch.Tensor],
    keys_at_target: Sequence[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
) -> Rope:
    """Find, for each layer, the table and layout that turn the keys at ``source`` into the keys at ``target``.

    Args:
        tables: Every RoPE table found in the model (none for models without rotation).
        keys_at_source: Per layer, ``[kv_heads, tokens, head_dim]`` of a token sequence run at positions ``source``.
        keys_at_target: Keys of the same tokens run at positions ``target``.
        source: ``[tokens]``.
        target: ``[tokens]``, ``source`` plus a constant (so that attention within the sequence is unchanged).

    Raises:
        NotRotaryError: No table and layout fit some layer.
    """
    deltas = [_delta(table, _distinct_columns(table, source.device), source, target) for table in tables]
    chosen: list[tuple[int, Layout]] = []
    for layer, (old, new) in enumerate(zip(keys_at_source, keys_at_target, strict=True)):
        best: tuple[float, int, Layout] = (_token_error(old, new), 0, "none")
        for index, delta in enumerate(deltas):
            if 2 * delta.cos.shape[-1] > old.shape[-1]:
                continue
            for layout in ("half", "interleaved"):
                error = _token_error(apply_rotation(old, delta, layout), new)
                best = min(best, (error, index, layout))
        if not best[0] <= _TOLERANCE[old.dtype]:
            raise NotRotaryError(
                f"keys of layer {layer} do not move between positions by any known rotation (best relative error {best[0]:.2g})"
            )
        chosen.append((best[1], best[2]))
    return Rope(tables, [index for index, _ in chosen], [layout for _, layout in chosen])


def differ(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether two tensors of one model differ by more than the arithmetic noise of their dtype."""
    error = (before.float() - after.float()).norm() / after.float().norm().clamp_min(1e-30)
    return not float(error) <= _TOLERANCE[before.dtype]


def _token_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error of keys ``[kv_heads, tokens, head_dim]`` at the median token.

    Rounding may send single tokens to other experts, which changes their keys; a wrong rotation is wrong for all
    tokens.
    """
    got, want = got.float(), want.float()
    size = want.square().sum((0, 2)).clamp_min(1e-30)
    return float(((got - want).square().sum((0, 2)) / size).sqrt().median())
