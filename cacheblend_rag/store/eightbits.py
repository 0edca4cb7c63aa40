"""Encodes numbers in one byte each, with a scale for every group of them.

Scales are powers of two. So a stored number times its scale is exact in every dtype that models compute in, and encoding what was
decoded gives the same bytes again: an entry that moves between tiers, or is written anew, drifts no further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

_WHOLE: Final = {16: torch.int16, 32: torch.int32, 64: torch.int64}


class Quantised(NamedTuple):
    """Holds a tensor in one byte a number.

    Attributes:
        codes: The stored numbers, in the tensor's shape.
        scales: What they are multiplied by, in the tensor's dtype; its shape, with 1 where numbers share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class EightBits:
    """Encodes tensors in one kind of numbers of one byte.

    Attributes:
        dtype: Theirs: ``int8`` or ``float8_e4m3fn``.
        top: The largest number that may be rounded to one of them. It lies between two of them or is one, and so does its half:
            the scale of rounded numbers is then that of the numbers.
        dims: Dimensions of ``[kv_heads, tokens, head_dim]`` along which numbers share a scale.
    """

    dtype: torch.dtype
    top: float
    dims: tuple[int, ...]

    def encode(self, x: torch.Tensor) -> Quantised | None:
        """Encode ``x``, ``[kv_heads, tokens, head_dim]``: each number is off by half a step at the most.

        Steps are one scale (int8: at the most 1/64 of the group's largest number), or 1/8 of the power of two below the number
        (fp8: at least 1/512 of the scale).

        Returns:
            None for what has no numbers, is not of floating point, or holds infinity, NaN or numbers close to its dtype's end.
        """
        if not x.numel() or not x.is_floating_point():
            return None
        exact = torch.promote_types(x.dtype, torch.float32)
        largest = x.abs().amax(self.dims, keepdim=True).to(exact)
        if not bool((largest <= torch.finfo(x.dtype).max / 2).all()):
            return None
        scales = _power_of_two_from(largest / self.top).clamp_min(_least_scale(x.dtype))
        scaled = x.to(exact) / scales
        if self.dtype == torch.int8:
            return Quantised(scaled.round_().to(torch.int8), scales.to(x.dtype))
        end = torch.finfo(self.dtype).max
        return Quantised(scaled.clamp_(-end, end).to(self.dtype), scales.to(x.dtype))


INT8 = EightBits(torch.int8, 127.0, (2,))
"""A scale for each head and token."""
FP8 = EightBits(torch.float8_e4m3fn, 464.0, (1, 2))
"""A scale for each head. From 464 on the next number would be 480, which there is not: 448 is the last."""


def decode(stored: Quantised, into: torch.Tensor) -> None:
    """Write the numbers of ``stored`` to ``into``, of the same shape and the dtype of the scales."""
    codes, scales = stored
    if codes.dtype == torch.int8:
        torch.mul(codes, scales, out=into)
        return
    # PyTorch's own conversion of e4m3 is 20 times as slow on a CPU. Sign, exponent and mantissa moved to where a larger dtype has
    # them are the same number by a power of two: that between the two dtypes' smallest normal numbers.
    info = torch.finfo(into.dtype)
    shift = round(-math.log2(info.eps)) - 3
    kept = (0x80 << shift) - 1 | -1 << info.bits - 1  # what stands between is the sign again
    bits = codes.view(torch.int8).to(_WHOLE[info.bits]).bitwise_left_shift_(shift).bitwise_and_(kept)
    torch.mul(bits.view(into.dtype).mul_(2.0**-6 / info.tiny), scales, out=into)


def _power_of_two_from(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not below each number; 0 for 0."""
    mantissa, _ = torch.frexp(x)
    return torch.where((mantissa == 0.5) | (x == 0), x, x / mantissa)


def _least_scale(dtype: torch.dtype) -> float:
    # Below it no number of the dtype is a multiple, or numbers are no longer exact in the arithmetic above.
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, torch.finfo(torch.promote_types(dtype, torch.float32)).tiny)
