"""Makes copies of a model with widely used coarser weights, in bf16 and in 8, 6 and 4 bits, to compare blends with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import torch

from cacheblend_rag.calibrate.rounding import rounded, rounded_modules

WEIGHTS: Final = ("bf16", "8-bit", "6-bit", "4-bit")


@torch.no_grad()
def coarser(model: Any, names: Sequence[str] = WEIGHTS) -> dict[str, Any]:
    """Return copies of a model by the names of their weights.

    Args:
        model: A causal LM in fp32.
        names: Names in :data:`WEIGHTS`; weights in bits are made by :func:`~cacheblend_rag.calibrate.rounding.rounded`.
    """
    found = {}
    for name in names:
        copy = found[name] = deepcopy(model)
        if name == "bf16":
            copy.to(torch.bfloat16)
            continue
        for module in rounded_modules(copy):
            module.weight.copy_(rounded(module.weight, int(name.removesuffix("-bit"))))
    return found
