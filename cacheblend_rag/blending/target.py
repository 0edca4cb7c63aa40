"""Defines what an engine supplies for blending: one prompt in its running model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.rope import Move, Rope
from cacheblend_rag.store.kv import LayerKV


@dataclass(eq=False)
class StopForward(Exception):  # noqa: N818  (a signal, not an error)
    """Ends a pass at its stop layer, from inside the model's own forward."""

    fresh: LayerKV


class BlendTarget(Protocol):
    """Lets the fusor drive the running model; the only thing an engine supplies for blending.

    Positions that the fusor gives are in host memory; those of :meth:`place` are on the device, with the KV.

    Attributes:
        num_layers: Number of transformer layers.
        device: Where positions and placed KV must be.
        rope: The model's rotation.
        shows_attention: Whether its attention can be watched.
        placed: Whether all that is stored is in place, or on its way; the fusor says so.
    """

    num_layers: int
    device: torch.device
    rope: Rope
    placed: bool = False

    @property
    def shows_attention(self) -> bool:
        """Return it."""

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, with its keys moved, at ``positions``, ``[tokens]``, of the cache."""

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None] | None:
        """Begin to write all of ``stored``; return what to call before a layer reads the KV cache.

        None where this is not possible; then the layers are placed one by one.
        """

    def forward(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], stop_layer: int | None = None
    ) -> LayerKV | None:
        """Run the prompt's tokens at ``positions`` (ascending) through the model's own forward.

        Each layer's fresh KV is written at ``positions``, and attention sees keys at positions ``<=`` the query's.
        ``before_layer(i)`` must be called before layer ``i`` reads the KV cache. With ``stop_layer`` the pass ends
        there: that layer's fresh KV is returned and not written. Without, the last position's logits are kept.
        """

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Return the first of ``positions``, as many as one call of :meth:`forward` should take, and no more than ``most``."""

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over tensor-parallel ranks, so that all of them select the same tokens."""

    def agree(self, ok: bool) -> bool:
        """Return whether every tensor-parallel rank says ``ok``."""

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> Watch:
        """Prepare to run tokens as :meth:`forward` does, through all layers, and to watch those at ``watch_from`` and behind."""


class Watch(Protocol):
    """Runs tokens while their attention is watched. What this writes at their positions is computed again later."""

    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``; every later call's lie behind them."""

    def mean(self) -> torch.Tensor:
        """Return how much the watched tokens attend to each token of the prompt, ``[prompt tokens]``, fp32.

        The mean over layers, this rank's heads and the watched tokens.
        """
