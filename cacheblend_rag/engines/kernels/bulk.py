"""Places all layers of stored KV in caches that are alike, by a launch for each group of layers; for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cacheblend_rag.blending.bulk import Arrivals, StoredLayers, bring
from cacheblend_rag.blending.transfer import Transfer, sent

if TYPE_CHECKING:
    from cacheblend_rag.engines.kernels.place import Layers


def place_in_bulk(
    stored: StoredLayers,
    slots: torch.Tensor,
    layers: Layers,
    transfer: Transfer,
    arrivals: Arrivals,
    *memory: torch.Tensor,
) -> None:
    """Begin to place ``stored``.

    Args:
        stored: What; in the caches' dtype.
        slots: ``[tokens]``, int64, on the device: where its tokens belong in a cache.
        layers: The caches of all layers.
        transfer: To their device.
        arrivals: Will tell when it has been placed.
        memory: The caches, where they may be freed before.
    """
    from cacheblend_rag.engines.kernels import place

    before, within, length = sent(stored.table(), slots.device)
    table = place.TokenTable(before, within, length, slots)

    def some(copied: torch.Tensor, begin: int, end: int) -> None:
        place.place_layers(copied, table, stored.moves[begin], layers._replace(offsets=layers.offsets[begin:end]))

    moves = {id(move): move for move in stored.moves if move is not None}.values()
    turned = [tensor for move in moves for tensor in (move.rotation.cos, move.rotation.sin)]
    bring(stored, transfer, arrivals, some, (*memory, *table, *turned, layers.offsets))
