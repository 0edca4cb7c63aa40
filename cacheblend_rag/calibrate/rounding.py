"""Rounds a model's weights to few bits: a widely accepted loss of accuracy to compare blends with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import pad

GROUP: Final = 32


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a matrix ``[outputs, inputs]`` rounded to nearest in ``bits`` bits.

    Weights become the nearest of evenly spaced numbers around 0, in groups of 32 inputs with one scale each. A last
    group with fewer inputs has its own scale. Rounding methods that use data lose less accuracy.
    """
    outputs, inputs = weight.shape
    groups = pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    near: torch.Tensor = (groups / scale).round() * scale
    return near.view(outputs, -1)[:, :inputs]


def rounded_modules(model: Any) -> list[torch.nn.Linear]:
    """Return the modules of a causal LM that are rounded: all linear modules but the head."""
    head = model.get_output_embeddings()
    return [each for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head]


@contextmanager
def rounded_weights(model: Any, bits: int) -> Iterator[None]:
    """Make a causal LM compute with rounded weights, one matrix at a time, without a second copy of the model."""
    own: dict[torch.nn.Linear, torch.Tensor] = {}

    def before(module: Any, _: Any) -> None:
        own[module] = module.weight.data
        module.weight.data = rounded(own[module], bits)

    def after(module: Any, _: Any, __: Any) -> None:
        module.weight.data = own.pop(module)

    handles: list[Any] = []
    for module in rounded_modules(model):
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for linear, weight in own.items():  # weights of an interrupted pass
            linear.weight.data = weight
