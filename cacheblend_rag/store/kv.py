"""Defines the KV caches of chunks, their layout in host memory, and the keys under which they are stored."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType

import torch

from cacheblend_rag.errors import DamagedKVError, InputError, StoreUnavailableError
from cacheblend_rag.store.files import DEFAULT_NAME
from cacheblend_rag.store.identity import ModelFingerprint as ModelFingerprint  # noqa: PLC0414 - exported here, too
from cacheblend_rag.store.identity import WrittenBy as WrittenBy  # noqa: PLC0414 - likewise

KVKey = NewType("KVKey", str)
"""Hex digest that names one stored entry; see :func:`kv_key`."""

_DIGEST_DIGITS = 40
_KEY = re.compile(r"[0-9a-f]{8,128}")


def is_key(text: str) -> bool:
    """Return whether ``text`` is a KV key. Tiers reject all other names, whatever a user types after ``store rm``."""
    return _KEY.fullmatch(text) is not None


def checked_key(key: KVKey) -> KVKey:
    """Return ``key`` after a check of its form.

    Raises:
        InputError: ``key`` is not a KV key.
    """
    if not is_key(key):
        raise InputError(f"{key!r} is not the id of a KV entry: ids are hex digits, see `cacheblend store ls`")
    return key


Take = Callable[[int], torch.Tensor]
"""Allocates ``nbytes`` of host memory as a uint8 tensor. The memory is unshared while the tensor or a view lives."""


class LayerKV(NamedTuple):
    """Holds keys and values of one layer, as the model caches them. A store returns them in one block, keys first.

    Attributes:
        k: Keys ``[kv_heads, tokens, head_dim]``, after RoPE at the positions where the entry was computed. With MLA the
            rotary key that all heads share, ``[1, tokens, rotary_dim]``.
        v: Values ``[kv_heads, tokens, value_dim]``. With MLA the latent for the other parts, ``[1, tokens,
            kv_lora_rank]``.
    """

    k: torch.Tensor
    v: torch.Tensor


def join_tokens(parts: Sequence[LayerKV]) -> LayerKV:
    """Concatenate one layer's KV of several runs of tokens along the token dimension."""
    if len(parts) == 1:
        return parts[0]
    return LayerKV(*(torch.cat(side, dim=1) for side in zip(*parts, strict=True)))


class StoredKV(ABC):
    """Reads a KV entry, layer by layer; :meth:`KVStore.get` returns one.

    Attributes:
        num_layers: Number of layers held.
        num_tokens: Number of tokens per layer.
        start: Position of the first token when the keys were computed (the header's length).
        nbytes: Size of the keys and values in bytes.
        stored_nbytes: Size of the stored keys and values in bytes, which a tier's codec reduces.
        tier: Name of the tier that :meth:`layer` reads from: ``"ram"``, ``"disk"`` or another tier's name.
        at_once: Number of reads of layers that are worth running in parallel.
        dtype: Dtype of keys and values that lie in memory; None if the dtype is known only after a read.
        exact: Whether the numbers are the computed numbers, never stored by a lossy codec.
    """

    num_layers: int
    num_tokens: int
    start: int
    nbytes: int
    stored_nbytes: int
    tier: str
    at_once: int = 1
    dtype: torch.dtype | None = None
    exact: bool = True

    @property
    def held(self) -> ChunkKV | None:
        """Return the entry as it lies in memory, with rows of bytes as layers if coded; None if it is not in memory."""
        return None

    @abstractmethod
    def layer(self, index: int) -> LayerKV:
        """Read one layer (blocking; callable from any thread, layers in any order).

        The tensors are shared and must not be written to.

        Raises:
            DamagedKVError: The stored bytes do not match their checksum; the tier has removed the entry.
            StoreUnavailableError: The stored bytes cannot be read now; the entry stays in the tier.
        """

    def layer_in(self, index: int, take: Take) -> LayerKV:
        """Read one layer as :meth:`layer` does; a layer that is not in memory yet is read into memory from ``take``."""
        return self.layer(index)

    def static_deviation(self) -> torch.Tensor | None:
        """Return each token's static deviation, ``[num_tokens]``, fp32; None if it was not measured or is damaged.

        See :mod:`cacheblend_rag.blending.static`. The call does not read the layers.
        """
        return None

    def whole(self, layers: Sequence[LayerKV]) -> ChunkKV:
        """Return this entry as a :class:`ChunkKV` with the given ``layers``."""
        return ChunkKV(layers, self.start, static=self.static_deviation(), exact=self.exact)

    def finish(self) -> None:  # noqa: B027 - most entries have nothing left to do
        """Let the tier process the whole entry, because no prompt waits for the entry any more (blocking)."""


class ChunkKV(StoredKV):
    """Holds a whole KV entry in memory. Immutable by convention: each use rotates a copy, never the entry in place."""

    def __init__(
        self,
        layers: Sequence[LayerKV],
        start: int,
        tier: str = "ram",
        static: torch.Tensor | None = None,
        exact: bool = True,
    ):
        """Hold ``layers`` (all with the same number of tokens), computed from position ``start`` on.

        :meth:`static_deviation` returns ``static``.
        """
        self.layers, self.start, self.tier = tuple(layers), start, tier
        self._static, self.exact = static, exact
        self.num_layers = len(self.layers)
        self.num_tokens = self.layers[0].k.shape[1] if self.layers else 0
        self.dtype = self.layers[0].k.dtype if self.layers else None
        self.nbytes = sum(t.numel() * t.element_size() for layer in self.layers for t in layer)
        self.stored_nbytes = self.nbytes
        self._blocks: dict[tuple[int, int], list[torch.Tensor] | None] = {}

    @property
    def held(self) -> ChunkKV:
        return self

    def layer(self, index: int) -> LayerKV:
        """Return one layer; never fails."""
        return self.layers[index]

    def blocks(self, begin: int, end: int) -> list[torch.Tensor] | None:
        """Return the layers ``begin`` to ``end - 1`` as few blocks ``[elements]``; None if a layer is not one block."""
        if (begin, end) not in self._blocks:
            flattened = [flat(layer) for layer in self.layers[begin:end]]
            blocks = [block for block in flattened if block is not None]
            self._blocks[begin, end] = _joined(blocks) if len(blocks) == len(flattened) else None
        return self._blocks[begin, end]

    def static_deviation(self) -> torch.Tensor | None:
        return self._static

    def ranked(self, static: torch.Tensor) -> ChunkKV:
        """Return a copy of the entry with the static deviation ``static``, ``[num_tokens]``; layers are shared."""
        return ChunkKV(self.layers, self.start, static=static, exact=self.exact)


def read_whole(kv: StoredKV) -> ChunkKV | None:
    """Read all layers of an entry into memory; return None if the entry is damaged, or cannot be read now."""
    try:
        return kv.whole([kv.layer(index) for index in range(kv.num_layers)])
    except (DamagedKVError, StoreUnavailableError):
        return None


class Shard(NamedTuple):
    """Identifies the part of an entry that one of at most 255 tensor-parallel ranks stores: the heads of the rank."""

    rank: int
    ranks: int


class KeyName(NamedTuple):
    """Holds the parts that an encryption key adds to the KV keys of the entries it encrypts.

    Attributes:
        id: 16 hex digits that identify the encryption key; the KV keys of its entries end with ``id``.
        secret: Input to the hash in the KV key. Without the encryption key nobody can find out whether a known text is
            stored.
    """

    id: str
    secret: str


def kv_key(
    fingerprint: ModelFingerprint,
    header_ids: Sequence[int],
    token_ids: Sequence[int],
    shard: Shard | None = None,
    namespace: str = DEFAULT_NAME,
    encrypted: KeyName | None = None,
    writer: WrittenBy | None = None,
) -> KVKey:
    """Return the KV key for the KV of ``token_ids`` computed behind ``header_ids``, or for a ``shard`` of the KV.

    The key covers everything that the stored numbers depend on, the namespace, and the encryption key. The KV key ends
    with the shard and the encryption key's id, so that a listing of the store shows the shards of an entry
    (:func:`entry_of`). The model itself computes the header's KV, so ``writer`` does not change the header's key.
    """
    parts: list[object] = [fingerprint.digest, list(header_ids), list(token_ids)]
    if writer is not None and len(token_ids):
        parts.append({"writer": writer.digest})
    if namespace != DEFAULT_NAME:
        parts.append(namespace)
    if encrypted is not None:
        parts.append({"secret": encrypted.secret})
    text = json.dumps(parts, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
    part = "" if shard is None else f"{shard.rank:02x}{shard.ranks:02x}"
    return KVKey(digest + part + ("" if encrypted is None else encrypted.id))


def entry_of(key: KVKey) -> str:
    """Return the prefix that the keys of all shards of an entry share with each other, and with no other entry."""
    return key[:_DIGEST_DIGITS]


ALIGNMENT = 64
"""Alignment in bytes of layers that are read into one block in any order."""


def plain(nbytes: int) -> torch.Tensor:
    """Return memory that is not page-locked; a :data:`Take`."""
    with torch.inference_mode(False):  # threads outside of inference mode will write to the memory
        return torch.empty(nbytes, dtype=torch.uint8)


def can_page_lock(device: torch.device) -> bool:
    """Return whether ``device`` has streams, and so can copy from page-locked memory asynchronously."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def flat(layer: LayerKV) -> torch.Tensor | None:
    """Return a layer as one tensor ``[elements]``, keys then values, without a copy; None if it is not one block."""
    k, v = layer
    if k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        return None
    return torch.as_strided(k, (k.numel() + v.numel(),), (1,)) if _follows(k, v) else None


def _joined(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join blocks ``[elements]`` that follow each other directly in the same memory."""
    found: list[torch.Tensor] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and _follows(last, block):
            found[-1] = last.as_strided((len(last) + len(block),), (1,))
        else:
            found.append(block)
    return found


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether ``other`` lies directly behind ``one`` in the same memory."""
    same = one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and other.storage_offset() == one.storage_offset() + one.numel()


def unflat(elements: torch.Tensor, like: LayerKV) -> LayerKV:
    """Split ``elements`` into keys and values in the shapes of ``like``."""
    k, v = torch.split(elements, [like.k.numel(), like.v.numel()])
    return LayerKV(k.view(like.k.shape), v.view(like.v.shape))


def laid_out(layers: Sequence[LayerKV], memory: torch.Tensor) -> list[LayerKV]:
    """Return consecutive views of ``memory``, ``[nbytes]``, uint8, with the shapes and dtypes of ``layers``."""
    views: list[torch.Tensor] = []
    at = 0
    for tensor in (tensor for layer in layers for tensor in layer):
        at += -at % tensor.element_size()
        end = at + tensor.numel() * tensor.element_size()
        views.append(memory[at:end].view(tensor.dtype).view(tensor.shape))
        at = end
    return [LayerKV(k, v) for k, v in zip(views[::2], views[1::2], strict=True)]


def nbytes_of(layers: Sequence[LayerKV]) -> int:
    """Return the bytes that :func:`laid_out` needs, including padding between tensors of different dtypes."""
    at = 0
    for tensor in (tensor for layer in layers for tensor in layer):
        at += -at % tensor.element_size() + tensor.numel() * tensor.element_size()
    return at


def packed(layers: Sequence[LayerKV], take: Take = plain) -> list[LayerKV]:
    """Copy ``layers`` into one block of memory from ``take``; return the copy."""
    copies = laid_out(layers, take(nbytes_of(layers)))
    for copy, layer in zip(copies, layers, strict=True):
        for into, tensor in zip(copy, layer, strict=True):
            into.copy_(tensor.detach())
    return copies


class Pieces:
    """Cuts one block into consecutive pieces, in the order of the calls; a :data:`Take`."""

    def __init__(self, block: torch.Tensor):
        """Cut ``block``, ``[nbytes]``, uint8."""
        self._block, self._used = block, 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> torch.Tensor:
        """Return the next piece of the block, or newly allocated memory if the block has too few bytes left."""
        with self._lock:
            begin = self._used
            if begin + nbytes > len(self._block):
                return plain(nbytes)
            self._used = begin + nbytes + -nbytes % ALIGNMENT
        return self._block[begin : begin + nbytes]
