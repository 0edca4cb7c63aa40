"""Turns the KV of a layer into the named tensors that are stored, and back: as it is, or in numbers of one byte.

Scales of such numbers are powers of two. So a stored number times its scale is exact in every dtype that models compute in, and
encoding what was decoded gives the same bytes again: an entry that moves between tiers, or is written anew, drifts no further.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV, Take, laid_out, nbytes_of, plain

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
    """Return the smallest power of two that is not below each number, as a float32 has it; 0 for 0."""
    mantissa, _ = torch.frexp(x)
    # PyTorch rounds a float64 to a float32 before it rounds that to one byte, and might round it to the next scale's half.
    return torch.where(x == 0, x, x / torch.where(mantissa.float() == 0.5, 2 * mantissa, mantissa))


def _least_scale(dtype: torch.dtype) -> float:
    # Below it no number of the dtype is a multiple, or numbers are no longer exact in the arithmetic above.
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, torch.finfo(torch.promote_types(dtype, torch.float32)).tiny)


RAW: Final = "raw"
"""The codec that stores keys and values as they are; ``none`` in addresses."""
# Of one name and one dtype the layers' tensors lie one after another in the file, so that each layer is one read.
_PACKED: Final = "packed"
_ZSTD: Final = "+zstd"
_SCALE: Final = ".scale"
_LEVEL: Final = 1  # higher ones make KV no smaller


class Codec:
    """Stores layers in one way. An entry names its codec, so a tier may hold entries of several.

    As they are, keys and values are stored bit for bit. In fewer bytes a layer is stored as the bytes of a safetensors file,
    as they are or by Zstandard: in it are ``k`` and ``v``; if they are numbers of one byte, ``k.scale`` and ``v.scale``, too.
    What one byte cannot hold (infinity, NaN) is there as it is.

    Attributes:
        name: The name in stored metadata; a change of the stored numbers needs a new one.
        in_place: Whether the stored bytes are the layer itself.
    """

    def __init__(self, name: str, k: EightBits | None = None, v: EightBits | None = None, zstd: bool = False):
        """Store keys and values as these numbers, None for as they are."""
        self.name, self._kinds, self._zstd = name, (k, v), zstd
        self.in_place = k is None and v is None and not zstd

    @property
    def exact(self) -> Codec:
        """Return the codec for what must stay as it is."""
        return Codec(RAW + _ZSTD * self._zstd, zstd=self._zstd)

    def encode(self, layer: LayerKV) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name, on any device."""
        if self.in_place:
            return {"k": layer.k, "v": layer.v}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor, kind in zip("kv", layer, self._kinds, strict=True):
            plain = tensor.detach().cpu()
            stored = None if kind is None else kind.encode(plain)
            if stored is None:
                tensors[name] = plain.clone(memory_format=torch.contiguous_format)
            else:
                tensors[name], tensors[name + _SCALE] = stored
        data = save(tensors)
        if self._zstd:
            data = _zstandard().ZstdCompressor(level=_LEVEL).compress(data)
        return {_PACKED: torch.frombuffer(bytearray(data), dtype=torch.uint8)}

    def decode(self, tensors: Mapping[str, torch.Tensor], take: Take) -> LayerKV:
        """Return the layer that was encoded, in memory from ``take`` unless :attr:`in_place`.

        Args:
            tensors: They have passed their checksum.
            take: Where the layer shall lie.

        Raises:
            ValueError: They are none of this codec.
        """
        if self.in_place:
            if tensors.keys() != {"k", "v"}:
                raise ValueError(f"a layer of {', '.join(sorted(tensors)) or 'nothing'} instead of k, v")
            return LayerKV(tensors["k"], tensors["v"])
        try:
            data = tensors[_PACKED].numpy().tobytes()
            if self._zstd:
                data = _decompressed(data)
            stored = load(data)
            parts = [(stored[name], stored.get(name + _SCALE)) for name in "kv"]
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"no layer of the codec {self.name}: {error!r}") from error
        k, v = (torch.empty(x.shape, dtype=(x if s is None else s).dtype, device="meta") for x, s in parts)
        like = LayerKV(k, v)
        (layer,) = laid_out([like], take(nbytes_of([like])))
        for into, (codes, scales) in zip(layer, parts, strict=True):
            if scales is None:
                into.copy_(codes)
            else:
                decode(Quantised(codes, scales), into)
        return layer


_KINDS: Final[dict[str, tuple[EightBits | None, EightBits | None]]] = {
    RAW: (None, None),
    "fp8": (FP8, FP8),
    "int8": (INT8, INT8),
    "k16v8": (None, INT8),
}

LOSSY: Final = tuple(name for name, kinds in _KINDS.items() if any(kinds))
"""Codecs that store other numbers than they were given."""


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``: ``none`` (or ``raw``), ``fp8``, ``int8`` or ``k16v8``, each also with ``+zstd`` behind.

    Raises:
        InputError: There is none of that name, or the package that it takes is missing.
    """
    base = name.removesuffix(_ZSTD)
    base = RAW if base == "none" else base
    if base not in _KINDS:
        raise InputError(f"unknown KV codec {name!r}: use one of none, fp8, int8, k16v8, each also with {_ZSTD} behind")
    zstd = name.endswith(_ZSTD)
    if zstd:
        _zstandard()
    return Codec(base + _ZSTD * zstd, *_KINDS[base], zstd)


def is_lossy(name: str) -> bool:
    """Say whether a codec stores other numbers than it was given."""
    return name.removesuffix(_ZSTD) in LOSSY


def through(name: str, layer: LayerKV) -> LayerKV:
    """Return a layer as it is read back once it was stored by the codec ``name``, in host memory; raises as :func:`get_codec`."""
    codec = get_codec(name)
    return codec.decode({name: tensor.cpu() for name, tensor in codec.encode(layer).items()}, plain)


def _zstandard() -> Any:
    if importlib.util.find_spec("zstandard") is None:
        raise InputError(
            "Zstandard takes a package that is missing: pip install 'cacheblend-rag[zstd]', or leave +zstd out of the codec."
        )
    import zstandard

    return zstandard


def _decompressed(data: bytes) -> bytes:
    zstandard = _zstandard()
    try:
        found: bytes = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"not by Zstandard: {error}") from error
    return found
