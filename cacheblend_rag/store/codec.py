"""What turns the KV of a layer into the named tensors that are stored, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import LayerKV


class Codec(Protocol):
    """One way to store a layer. Its name is part of the KV key, so entries of two codecs never meet under one key."""

    @property
    def name(self) -> str:
        """The name in keys and in stored metadata; a change of the stored numbers needs a new one."""

    def encode(self, layer: LayerKV) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name, on any device."""

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> LayerKV:
        """Return the layer that was encoded, given tensors that have passed their checksum."""


class RawCodec:
    """Keys and values as they are, bit for bit, in the dtype they were computed in."""

    name = "raw"

    def encode(self, layer: LayerKV) -> dict[str, torch.Tensor]:
        """Return the two tensors of ``layer``."""
        return {"k": layer.k, "v": layer.v}

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> LayerKV:
        """Return the layer made of the two tensors."""
        return LayerKV(tensors["k"], tensors["v"])


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(),)}


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``.

    Raises:
        InputError: There is none of that name.
    """
    if name not in _CODECS:
        raise InputError(f"unknown KV codec {name!r}: use one of {', '.join(sorted(_CODECS))}")
    return _CODECS[name]
