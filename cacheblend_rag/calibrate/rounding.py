"""Rounds a model's weights to few bits: a widely accepted loss of accuracy to compare blends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Run a model with the attention implementation that transformers would have chosen."""
    ours = model.config.get_text_config()._attn_implementation
    if ours == "eager":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def rounded_logits(model: Any, bits: int) -> Callable[[Sequence[int], int], torch.Tensor]:
    """Return a function that computes the logits ``[last, vocab]`` of a prompt's ``last`` tokens with rounded weights."""

    @torch.no_grad()
    def logits(ids: Sequence[int], last: int) -> torch.Tensor:
        with own_attention(model), rounded_weights(model, bits):
            given = torch.tensor([list(ids)], device=model.device)
            found: torch.Tensor = model(input_ids=given, use_cache=False, logits_to_keep=last).logits[0, -last:]
        return found

    return logits
