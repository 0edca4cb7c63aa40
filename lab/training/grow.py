"""Grows a finished model into one with more to learn that computes the same, to train on from there."""

from __future__ import annotations

from dataclasses import replace

import torch

from training.batches import BIND_LAYER
from training.model import DemoModel, beside, initialise


@torch.no_grad()
def grow(finished: DemoModel, layers: int) -> DemoModel:
    """Return a model with more layers and the same outputs.

    The new layers add nothing to the residual stream at first (their output projections are zero). The first stands right
    behind the layer that reads what `BIND_LAYER` gets, where a second look-up can happen, each other one layer later.

    Args:
        finished: The model to grow from.
        layers: Number of layers wanted.

    Raises:
        ValueError: Fewer layers than the model has, or more new ones than it has layers to stand in front of.
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
    """Tell heads apart that are twins: same queries and outputs over the same keys and values; returns how many there were.

    Twins have the same gradients, so training never tells them apart. The first takes over what both add; the other begins
    beside it, adding nothing at first.
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
