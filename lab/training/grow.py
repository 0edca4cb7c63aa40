"""Adds layers to a finished model without changing its outputs, as a start for further training."""

from __future__ import annotations

from dataclasses import replace

import torch

from training.batches import BIND_LAYER
from training.model import DemoModel, initialise


@torch.no_grad()
def grow(finished: DemoModel, layers: int) -> DemoModel:
    """Return a model with more layers and unchanged outputs.

    The new layers add nothing to the residual stream at first (their output projections are zero). The first new layer
    is directly behind layer `BIND_LAYER`, where a second look-up can happen; the others alternate with the next old
    layers.

    Args:
        finished: The model to grow from.
        layers: Number of layers wanted.

    Raises:
        ValueError: `layers` is smaller than the model's number of layers, or larger than the number of places allows.
    """
    old, first = finished.shape.layers, BIND_LAYER + 1
    added = layers - old
    if not 0 <= added <= old - first:
        raise ValueError(f"A model of {old} layers grows to at most {2 * old - first} and not to {layers}.")
    model = DemoModel(replace(finished.shape, layers=layers))
    initialise(model)
    model.embed_tokens.load_state_dict(finished.embed_tokens.state_dict())
    model.norm.load_state_dict(finished.norm.state_dict())
    places = iter(model.blocks)
    for index, layer in enumerate(finished.blocks):
        if first <= index < first + added:
            new = next(places)
            new.self_attn.o_proj.weight.zero_()
            new.mlp.down_proj.weight.zero_()
        next(places).load_state_dict(layer.state_dict())
    return model
