"""What an engine supplies for blending: one prompt in its running model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch

from cacheblend_rag.blending.rope import Move, Rope
from cacheblend_rag.store.kv import LayerKV


class BlendTarget(Protocol):
    """The running model, as the fusor drives it; the only thing an engine supplies for blending.

    Attributes:
        num_layers: Number of transformer layers.
        device: Where positions and placed KV must be.
        rope: The model's rotation.
    """

    num_layers: int
    device: torch.device
    rope: Rope

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, with its keys moved, at ``positions``, ``[tokens]``, of the cache."""

    def forward(
        self,
        positions: torch.Tensor,
        before_layer: Callable[[int], None],
        stop_layer: int | None = None,
    ) -> LayerKV | None:
        """Run the prompt's tokens at ``positions`` (ascending) through the model's own forward.

        Each layer's fresh KV is written at ``positions``, and attention sees keys at positions ``<=`` the query's.
        ``before_layer(i)`` must be called before layer ``i`` reads the KV cache. With ``stop_layer`` the pass ends
        there: that layer's fresh KV is returned and not written. Without, the last position's logits are kept.
        """

    def segments(self, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut ``positions`` into ascending parts, each no more than one call of :meth:`forward` should take."""

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over tensor-parallel ranks, so that all of them select the same tokens."""

    def agree(self, ok: bool) -> bool:
        """Return whether every tensor-parallel rank says ``ok``."""

    def attention(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], watch_from: int
    ) -> Generator[float, None, torch.Tensor]:
        """Run the tokens at ``positions`` as :meth:`forward` does, through all layers, and watch those from ``watch_from`` on.

        What this writes at ``positions`` is computed again later. Yields as :func:`fuse_stepwise` does.

        Returns:
            How much the watched tokens attend to each token of the prompt, ``[prompt tokens]``, fp32, mean over layers, this
            rank's heads and the watched tokens.

        Raises:
            InputError: This model's attention cannot be watched.
        """
