"""Turns the KV of a layer into the named tensors that are stored, and back."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.block import laid_out, nbytes_of, plain
from cacheblend_rag.store.eightbits import FP8, INT8, EightBits, Quantised, decode
from cacheblend_rag.store.kv import LayerKV, Take

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
