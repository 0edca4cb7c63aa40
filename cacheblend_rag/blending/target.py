"""Defines the interface that an engine implements for blending: one prompt in its running model."""

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
    """Lets the fusor run passes of the model; an engine implements only this class for blending.

    Positions that the fusor gives are in host memory, except for :meth:`place`: there they are on the device, with the
    KV.

    Attributes:
        num_layers: Number of transformer layers.
        device: Device that positions and placed KV must be on.
        rope: The model's rotation.
        shows_attention: Whether the model's attention can be measured.
        placed: Whether all stored KV is in place or under way; the fusor sets it.
    """

    num_layers: int
    device: torch.device
    rope: Rope
    placed: bool = False

    @property
    def shows_attention(self) -> bool:
        """Return whether the model's attention can be measured."""

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, with its keys moved, to the cache at ``positions``, ``[tokens]``."""

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None] | None:
        """Begin to write all of ``stored``; return the function to call before a layer reads the KV cache.

        Return None if this is impossible; then the fusor places the layers one by one.
        """

    def forward(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], stop_layer: int | None = None
    ) -> LayerKV | None:
        """Run the prompt's tokens at ``positions`` (ascending) through the model's own forward.

        Each layer's fresh KV is written at ``positions``, and attention sees keys at positions ``<=`` the query's.
        ``before_layer(i)`` must be called before layer ``i`` reads the KV cache. With ``stop_layer`` the pass ends at
        that layer, whose fresh KV is returned and not written. Without ``stop_layer``, the last position's logits are
        kept.
        """

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Return the first of ``positions``: as many as one call of :meth:`forward` should take, at most ``most``."""

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over tensor-parallel ranks, so that all of them select the same tokens."""

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on every tensor-parallel rank."""

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> Watch:
        """Prepare to run tokens through all layers, as :meth:`forward` does, and to watch those from ``watch_from`` on."""


class Watch(Protocol):
    """Runs tokens and measures their attention. The KV written at their positions is computed again later."""

    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``; every later call's positions lie behind them."""

    def mean(self) -> torch.Tensor:
        """Return the attention of the watched tokens to each token of the prompt, ``[prompt tokens]``, fp32.

        The attention is the mean over layers, this rank's heads and the watched tokens.
        """
