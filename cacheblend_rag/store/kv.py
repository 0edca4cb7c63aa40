"""Defines KV caches of chunks, how they lie in host memory, the keys they are stored under, and the identity of the model."""

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
from cacheblend_rag.store.identity import ModelFingerprint as ModelFingerprint  # noqa: PLC0414 - found here, too
from cacheblend_rag.store.identity import WrittenBy as WrittenBy  # noqa: PLC0414 - likewise

KVKey = NewType("KVKey", str)
"""Hex digest that names one stored entry; see :func:`kv_key`."""

_DIGEST_DIGITS = 40
_KEY = re.compile(r"[0-9a-f]{8,128}")


def is_key(text: str) -> bool:
    """Say whether ``text`` is a KV key. Nothing else becomes a name in a tier, whatever a user types after ``store rm``."""
    return _KEY.fullmatch(text) is not None


def checked_key(key: KVKey) -> KVKey:
    """Return ``key``.

    Raises:
        InputError: It is not a KV key.
    """
    if not is_key(key):
        raise InputError(f"{key!r} is not the id of a KV entry: ids are hex digits, see `cacheblend store ls`")
    return key


Take = Callable[[int], torch.Tensor]
"""Gives host memory for so many bytes: a tensor ``[nbytes]``, uint8, that nobody else uses while it, or a view of it, lives."""


class LayerKV(NamedTuple):
    """Holds keys and values of one layer, as the model caches them. What a store hands out lies in one block, keys, then values.

    Attributes:
        k: ``[kv_heads, tokens, head_dim]``, after RoPE at the positions the entry was computed at. With MLA the rotary key that
            all heads share, ``[1, tokens, rotary_dim]``.
        v: ``[kv_heads, tokens, value_dim]``. With MLA the latent that holds the rest, ``[1, tokens, kv_lora_rank]``.
    """

    k: torch.Tensor
    v: torch.Tensor


def join_tokens(parts: Sequence[LayerKV]) -> LayerKV:
    """Return one layer's KV of several runs of tokens, one after another."""
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
        stored_nbytes: Size of what is stored of them, which a tier's codec makes smaller.
        tier: ``"ram"``, ``"disk"`` or a later tier's name: where :meth:`layer` reads from.
        at_once: How many reads of layers are worth having on the way side by side.
        dtype: Of keys and values, where they lie in memory; None where only reading tells.
        exact: Whether they are the numbers that were computed: no tier has kept them by a codec that stores others.
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
        """Return what of it lies in memory, as it lies there: a coded entry's layers are rows of bytes. None for nothing."""
        return None

    @abstractmethod
    def layer(self, index: int) -> LayerKV:
        """Read one layer (blocking; callable from any thread, layers in any order).

        The tensors are shared and must not be written to.

        Raises:
            DamagedKVError: The stored bytes do not match their checksum; the tier has dropped them.
            StoreUnavailableError: They cannot be read now; nothing was dropped.
        """

    def layer_in(self, index: int, take: Take) -> LayerKV:
        """Read one layer as :meth:`layer` does; a tier that must read it from elsewhere reads into memory from ``take``."""
        return self.layer(index)

    def static_deviation(self) -> torch.Tensor | None:
        """Return each token's static deviation, ``[num_tokens]``, fp32; None if it was never measured, or is damaged.

        See :mod:`cacheblend_rag.blending.static`. Reading it does not read the layers.
        """
        return None

    def whole(self, layers: Sequence[LayerKV]) -> ChunkKV:
        """Return this entry in memory, with ``layers`` for its own."""
        return ChunkKV(layers, self.start, static=self.static_deviation(), exact=self.exact)

    def finish(self) -> None:  # noqa: B027 - most entries have nothing left to do
        """Say that nobody waits any more: what a tier wants to do with the whole entry, it may do now (blocking)."""


class ChunkKV(StoredKV):
    """Holds a whole KV entry in memory. Immutable by convention: one canonical copy, rotated once per use, never in place."""

    def __init__(
        self,
        layers: Sequence[LayerKV],
        start: int,
        tier: str = "ram",
        static: torch.Tensor | None = None,
        exact: bool = True,
    ):
        """Hold ``layers`` (all with the same number of tokens), computed from position ``start`` on.

        ``static`` is what :meth:`static_deviation` returns.
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
        """Return the layers ``begin`` to before ``end`` as few blocks ``[elements]``; None where a layer is not one block."""
        if (begin, end) not in self._blocks:
            flattened = [flat(layer) for layer in self.layers[begin:end]]
            blocks = [block for block in flattened if block is not None]
            self._blocks[begin, end] = _joined(blocks) if len(blocks) == len(flattened) else None
        return self._blocks[begin, end]

    def static_deviation(self) -> torch.Tensor | None:
        return self._static

    def ranked(self, static: torch.Tensor) -> ChunkKV:
        """Return the same entry with a static deviation, ``[num_tokens]``."""
        return ChunkKV(self.layers, self.start, static=static, exact=self.exact)


def read_whole(kv: StoredKV) -> ChunkKV | None:
    """Read all layers of an entry into memory; None if it is damaged, or cannot be read now."""
    try:
        return kv.whole([kv.layer(index) for index in range(kv.num_layers)])
    except (DamagedKVError, StoreUnavailableError):
        return None


class Shard(NamedTuple):
    """Names what one tensor-parallel rank of several, 255 at most, stores of an entry: its own heads."""

    rank: int
    ranks: int


class KeyName(NamedTuple):
    """Holds what a key gives to the names of the entries that it encrypts.

    Attributes:
        id: 16 hex digits that tell the key from others; every such name ends with them.
        secret: Goes into the hash in front of them: without the key nobody can tell whether a text that he knows is stored.
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
    """Return the store key of the KV of ``token_ids`` computed behind ``header_ids``, or of a ``shard`` of it.

    The key covers everything the stored numbers depend on, whose they are, and what they are ``encrypted`` by. It ends with the
    shard and the encryption's id, so that who lists a store finds the shards of an entry (:func:`entry_of`). The header's own KV
    is the model's, whatever ``writer`` writes that of chunks.
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
    """Return what the keys of an entry have in common, whichever ranks wrote it, and those of no other entry."""
    return key[:_DIGEST_DIGITS]


ALIGNMENT = 64
"""Bytes to which layers are aligned that are read into one block in any order."""


def plain(nbytes: int) -> torch.Tensor:
    """Return ordinary memory; a :data:`Take`."""
    with torch.inference_mode(False):  # other threads, which are in no such mode, will write to it
        return torch.empty(nbytes, dtype=torch.uint8)


def can_page_lock(device: torch.device) -> bool:
    """Say whether ``device`` copies from page-locked memory by itself, which takes streams."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def flat(layer: LayerKV) -> torch.Tensor | None:
    """Return a layer as one tensor ``[elements]``, keys then values, without a copy; None where it is not one block."""
    k, v = layer
    if k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        return None
    return torch.as_strided(k, (k.numel() + v.numel(),), (1,)) if _follows(k, v) else None


def _joined(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return blocks ``[elements]`` with those made one that lie one right behind the other in the same memory."""
    found: list[torch.Tensor] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and _follows(last, block):
            found[-1] = last.as_strided((len(last) + len(block),), (1,))
        else:
            found.append(block)
    return found


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether ``other`` lies right behind ``one`` in the same memory."""
    same = one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and other.storage_offset() == one.storage_offset() + one.numel()


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
