"""Lays an entry's bytes out in host memory: each layer one contiguous block, its keys, then its values."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from cacheblend_rag.store.kv import LayerKV, Take

ALIGNMENT = 64
"""Bytes to which layers are aligned that are read into one block in any order."""


def plain(nbytes: int) -> torch.Tensor:
    """Return ordinary memory; a :data:`Take`."""
    with torch.inference_mode(False):  # other threads, which are in no such mode, will write to it
        return torch.empty(nbytes, dtype=torch.uint8)


def flat(layer: LayerKV) -> torch.Tensor | None:
    """Return a layer as one tensor ``[elements]``, keys then values, without a copy; None where it is not one block."""
    k, v = layer
    if k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        return None
    follows = v.storage_offset() == k.storage_offset() + k.numel()
    if not follows or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        return None
    return torch.as_strided(k, (k.numel() + v.numel(),), (1,))


def unflat(elements: torch.Tensor, like: LayerKV) -> LayerKV:
    """Return the keys and values that lie one behind the other in ``elements``, in the shapes of ``like``."""
    k, v = torch.split(elements, [like.k.numel(), like.v.numel()])
    return LayerKV(k.view(like.k.shape), v.view(like.v.shape))


def laid_out(layers: Sequence[LayerKV], memory: torch.Tensor) -> list[LayerKV]:
    """Return views with the shapes and dtypes of ``layers``, one behind the other in ``memory``, ``[nbytes]``, uint8."""
    views: list[torch.Tensor] = []
    at = 0
    for tensor in (tensor for layer in layers for tensor in layer):
        at += -at % tensor.element_size()
        end = at + tensor.numel() * tensor.element_size()
        views.append(memory[at:end].view(tensor.dtype).view(tensor.shape))
        at = end
    return [LayerKV(k, v) for k, v in zip(views[::2], views[1::2], strict=True)]


def nbytes_of(layers: Sequence[LayerKV]) -> int:
    """Return the bytes that :func:`laid_out` needs; with several dtypes some of them stay unused between tensors."""
    at = 0
    for tensor in (tensor for layer in layers for tensor in layer):
        at += -at % tensor.element_size() + tensor.numel() * tensor.element_size()
    return at


def packed(layers: Sequence[LayerKV], take: Take = plain) -> list[LayerKV]:
    """Return a copy of ``layers`` in one piece of memory from ``take``."""
    copies = laid_out(layers, take(nbytes_of(layers)))
    for copy, layer in zip(copies, layers, strict=True):
        for into, tensor in zip(copy, layer, strict=True):
            into.copy_(tensor.detach())
    return copies


class Pieces:
    """Cuts one block into pieces, one behind another, in the order in which they are asked for; a :data:`Take`."""

    def __init__(self, block: torch.Tensor):
        """Cut ``block``, ``[nbytes]``, uint8."""
        self._block, self._used = block, 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> torch.Tensor:
        """Return the next piece; ordinary memory where nothing is left."""
        with self._lock:
            begin = self._used
            if begin + nbytes > len(self._block):
                return plain(nbytes)
            self._used = begin + nbytes + -nbytes % ALIGNMENT
        return self._block[begin : begin + nbytes]
