"""Adds layers to a finished model without changing its outputs, as a start for further training."""

from __future__ import annotations

from dataclasses import replace

import torch

from training.batches import BIND_LAYER
from training.model import DemoModel, beside, initialise


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


@torch.no_grad()
def part_twins(model: DemoModel) -> int:
    """Separate identical heads, with shared keys and values and equal query and output weights; return their number.

    Identical heads get equal gradients, so training never separates them. The first head takes over the sum of their
    outputs; the other heads get similar queries and output weights of zero.
    """
    groups, dim = model.shape.heads // model.shape.kv_heads, model.shape.head_dim
    parted = 0
    for layer in model.blocks:
        queries = layer.self_attn.q_proj.weight.view(-1, groups, dim, model.shape.hidden)
        outputs = layer.self_attn.o_proj.weight.view(model.shape.hidden, -1, groups, dim)
        for query, output in zip(queries, outputs.unbind(1), strict=True):
            twins = [
                head
                for head in range(1, groups)
                if torch.equal(query[head], query[0]) and torch.equal(output[:, head], output[:, 0])
            ]
            output[:, 0] *= 1 + len(twins)
            for head in twins:
                query[head] = beside(query[0])
                output[:, head] = 0
            parted += len(twins)
    return parted
