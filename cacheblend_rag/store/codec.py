"""Encodes the KV of a layer as the named tensors that are stored, and decodes it: unchanged, or quantised to int8.

The scales are powers of two. A stored number times its scale is therefore exact in every dtype that models compute in,
and encoding a decoded layer gives the same bytes again. An entry that moves between tiers, or is rewritten, loses no
more accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import ChunkKV, LayerKV, StoredKV, Take, laid_out, nbytes_of, plain

_LARGEST = 127.0  # half of 127 rounds up to 64, so that rounded numbers have the same scale as the original numbers


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Quantise ``x``, ``[kv_heads, tokens, head_dim]``, to int8 with an error of at most half a scale for each number.

    Returns:
        The numbers, int8, in the shape of ``x``, and the scales ``[kv_heads, tokens, 1]`` in the dtype of ``x``, each
        at most 1/64 of the largest number of a head and token. None if ``x`` is empty, is not of floating point, or
        holds infinity, NaN or numbers above half of the dtype's maximum.
    """
    if not x.numel() or not x.is_floating_point():
        return None
    exact, info = torch.promote_types(x.dtype, torch.float32), torch.finfo(x.dtype)
    largest = x.abs().amax(2, keepdim=True).to(exact)
    if not bool((largest <= info.max / 2).all()):
        return None
    # Smaller scales are not representable in the dtype, or not exact in this arithmetic.
    least = max(info.tiny * info.eps, torch.finfo(exact).tiny)
    scales = _power_of_two_from(largest / _LARGEST).clamp_min(least)
    return (x.to(exact) / scales).round_().to(torch.int8), scales.to(x.dtype)


def _power_of_two_from(x: torch.Tensor) -> torch.Tensor:
    """Return, for each number, the smallest power of two that is not below the number; 0 for 0."""
    mantissa, _ = torch.frexp(x)
    return torch.where(x == 0, x, x / torch.where(mantissa == 0.5, 2 * mantissa, mantissa))


RAW: Final = "raw"
"""The codec that stores keys and values unchanged; ``none`` in addresses."""
LOSSY: Final = "int8"
"""The codec that stores rounded numbers."""
# Tensors with one name and one dtype follow one another in the file, layer by layer, so that each layer is one read.
_PACKED: Final = "packed"
_SCALE: Final = ".scale"


class Codec:
    """Encodes and decodes layers. Each entry names its codec, so a tier may hold entries of several codecs.

    ``raw`` stores keys and values bit for bit. ``int8`` stores a layer as the bytes of a safetensors file with ``k``
    and ``v``, and with ``k.scale`` and ``v.scale`` if they are :func:`quantised`. Tensors that int8 cannot hold
    (infinity, NaN) are stored unchanged.

    Attributes:
        name: The name in stored metadata; a change of the stored numbers needs a new name.
        in_place: Whether the stored bytes are the layer itself.
    """

    def __init__(self, name: str):
        """Create the codec called ``name``: :data:`RAW` or :data:`LOSSY`."""
        self.name, self.in_place = name, name == RAW

    def encode(self, layer: LayerKV) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name, on any device."""
        if self.in_place:
            return {"k": layer.k, "v": layer.v}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in zip("kv", layer, strict=True):
            plain = tensor.detach().cpu()
            if (stored := quantised(plain)) is None:
                tensors[name] = plain.clone(memory_format=torch.contiguous_format)
            else:
                tensors[name], tensors[name + _SCALE] = stored
        return {_PACKED: torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)}

    def decode(self, tensors: Mapping[str, torch.Tensor], take: Take) -> LayerKV:
        """Decode ``tensors`` that have passed their checksum, into memory from ``take`` unless :attr:`in_place`.

        Raises:
            ValueError: The tensors were not encoded by this codec.
        """
        if self.in_place:
            if tensors.keys() != {"k", "v"}:
                raise ValueError(f"a layer of {', '.join(sorted(tensors)) or 'nothing'} instead of k, v")
            return LayerKV(tensors["k"], tensors["v"])
        try:
            stored = load(tensors[_PACKED].numpy().tobytes())
            parts = [(stored[name], stored.get(name + _SCALE)) for name in "kv"]
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"no layer of the codec {self.name}: {error!r}") from error
        return _decoded(parts, take)


def _decoded(parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]], take: Take) -> LayerKV:
    """Decode keys and values, each given as numbers and scales, into one block from ``take``."""
    k, v = (torch.empty(x.shape, dtype=(x if s is None else s).dtype, device="meta") for x, s in parts)
    like = LayerKV(k, v)
    (layer,) = laid_out([like], take(nbytes_of([like])))
    for into, (codes, scales) in zip(layer, parts, strict=True):
        if scales is None:
            into.copy_(codes)
        else:
            torch.mul(codes, scales, out=into)
    return layer


class CodedKV(StoredKV):
    """Holds a whole entry in memory as int8 numbers, to be decoded where the entry is used, for example on a device."""

    dtype: torch.dtype
    exact = False

    def __init__(self, held: ChunkKV, dtype: torch.dtype):
        """Hold an entry whose layers :func:`coded` has encoded from ``dtype``."""
        self._held, self.dtype = held, dtype
        self.num_layers, self.num_tokens, self.start, self.tier = (
            held.num_layers,
            held.num_tokens,
            held.start,
            held.tier,
        )
        rows = (side.shape for layer in held.layers for side in layer)
        self.nbytes = sum(h * tokens * (width - dtype.itemsize) * dtype.itemsize for h, tokens, width in rows)
        self.stored_nbytes = held.nbytes

    @property
    def held(self) -> ChunkKV:
        return self._held

    def layer(self, index: int) -> LayerKV:
        return self.layer_in(index, plain)

    def layer_in(self, index: int, take: Take) -> LayerKV:
        return _decoded([_parts(side, self.dtype) for side in self._held.layer(index)], take)

    def static_deviation(self) -> torch.Tensor | None:
        return self._held.static_deviation()


def coded(kv: ChunkKV) -> list[LayerKV] | None:
    """Encode layers as rows of int8 numbers and scale: ``[kv_heads, tokens, head_dim + bytes of a scale]``, uint8.

    The result is None if the entry must stay unchanged: tensors without one row per token, several dtypes, or numbers
    that int8 cannot hold.
    """
    layers, dtypes = [], {side.dtype for layer in kv.layers for side in layer}
    for layer in kv.layers if len(dtypes) == 1 else ():
        rows = []
        for side in layer:
            fits = side.dim() == 3 and side.shape[1] == kv.num_tokens and not side.shape[2] % side.element_size()
            if not fits or (parts := quantised(side.detach().cpu())) is None:
                return None
            rows.append(torch.cat([part.view(torch.uint8) for part in parts], 2))
        layers.append(LayerKV(*rows))
    return layers or None


def numbers(rows: LayerKV, dtype: torch.dtype) -> LayerKV:
    """Decode the rows of a layer into keys and values of ``dtype``, on the device of the rows."""
    k, v = (torch.mul(*_parts(side, dtype)) for side in rows)
    return LayerKV(k, v)


def _parts(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rows[..., : -dtype.itemsize].view(torch.int8), rows[..., -dtype.itemsize :].view(dtype)


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``: ``none`` (or ``raw``) or ``int8``.

    Raises:
        InputError: No codec has that name.
    """
    if name not in ("none", RAW, LOSSY):
        raise InputError(f"unknown KV codec {name!r}: use none or int8")
    return Codec(RAW if name == "none" else name)


def through(name: str, layer: LayerKV) -> LayerKV:
    """Encode and decode a layer by the codec ``name`` in host memory; return the result. Raise as :func:`get_codec`."""
    codec = get_codec(name)
    return codec.decode({name: tensor.cpu() for name, tensor in codec.encode(layer).items()}, plain)
