"""Makes the copies of a model that people accept every day: in bf16, in 8, 6 and 4 bits, to set blends beside."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import torch

WEIGHTS: Final = ("bf16", "8-bit", "6-bit", "4-bit")
_GROUP = 32


@torch.no_grad()
def coarser(model: Any, names: Sequence[str] = WEIGHTS) -> dict[str, Any]:
    """Return copies of a model by the names of their weights.

    Weights in bits are rounded to the nearest of evenly spaced numbers around 0, in groups of 32 inputs with one scale each:
    all linear modules but the head. Methods that look at data lose less.

    Args:
        model: A causal LM in fp32.
        names: Of :data:`WEIGHTS`.
    """
    found = {}
    for name in names:
        copy = found[name] = deepcopy(model)
        if name == "bf16":
            copy.to(torch.bfloat16)
            continue
        for module in copy.modules():
            if isinstance(module, torch.nn.Linear) and module is not copy.get_output_embeddings():
                module.weight.copy_(rounded(module.weight, int(name.removesuffix("-bit"))))
    return found


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a matrix ``[outputs, inputs]`` rounded to nearest in so many bits; a group that is not full has its own scale."""
    most = 2 ** (bits - 1) - 1
    parts = []
    for group in torch.split(weight, _GROUP, 1):
        scale = group.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
        parts.append((group / scale).round() * scale)
    return torch.cat(parts, 1)
