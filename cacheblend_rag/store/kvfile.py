"""Encodes KV entries as bytes and decodes them: safetensors files, encrypted or not. Every byte is checked before use.

``docs/store.md`` describes the format. The module does not deal with budgets, locks or directories.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors.torch import save, save_file

from cacheblend_rag.errors import DamagedKVError, InputError, StoreUnavailableError, UnknownCodecError, UnknownKeyError
from cacheblend_rag.store.codec import RAW, Codec, get_codec
from cacheblend_rag.store.events import Events
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, StoredKV, Take, plain
from cacheblend_rag.store.source import SEALED, Keyring, LayerSource, SealedSource, read_bytes, seal

_log = logging.getLogger(__name__)

FORMAT = "cacheblend-kv/1"
"""Format name in every file. A new layout needs a new number, but must keep the places of format, key and checksum."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_STATIC, _STATIC_CHECKSUM = "static", "checksum.static"
_EXACT = "exact"
_MOST = 1 << 48  # limit of a size; PyTorch fails if some sizes are larger and another size is 0
_MAX_HEADER = 100_000_000  # limit of the safetensors library; a damaged length must not cause a larger allocation


class EncodedKV(NamedTuple):
    """Holds an entry ready to be written: named tensors in host memory, and the metadata with their checksums."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensors in bytes; the file is larger by its header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def parts_of(data: bytes) -> list[int]:
    """Return the end offsets of a file's separately read parts: header, adjacent tensors of each layer, rest."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    spans = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    ends, before = [8 + length], ""
    for (begin, end), name in spans:
        of = name if name == _STATIC else str(_layer_index(name))
        if begin == end:
            continue
        if of != before:
            ends.append(0)
        ends[-1], before = 8 + length + end, of
    return ends


class _Place(NamedTuple):
    """Describes a tensor in the file: name, dtype, shape, and offset in bytes from the file's beginning."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class KVFile(StoredKV):
    """Reads a KV entry from its source, one layer at a time, and checks each layer in the memory of the reader."""

    def __init__(
        self,
        source: LayerSource,
        key: KVKey,
        tier: str,
        on_damage: Callable[[KVFile, DamagedKVError], object],
        events: Events | None = None,
        at_once: int = 1,
        unseal: Callable[[], LayerSource] | None = None,
    ):
        """Read and check the header and the metadata.

        Args:
            source: Source of the entry's bytes.
            key: Key that the metadata must hold.
            tier: See :class:`StoredKV`.
            on_damage: Called with the handle and the error, here or from :meth:`layer`, before the error is raised.
            events: Counter for the reads of layers.
            at_once: See :class:`StoredKV`.
            unseal: Opens an encrypted entry: returns the source of its decrypted bytes, or raises ValueError or the
                errors below; None for an entry that is not encrypted.

        Raises:
            DamagedKVError: The bytes are not a whole entry of ``key``.
            StoreUnavailableError: The bytes cannot be read now.
            UnknownCodecError: The format or the codec of the entry is unknown.
            UnknownKeyError: The entry is encrypted with another key, or is encrypted and ``unseal`` is None.
        """
        self.source, self.key, self.tier, self.at_once = source, key, tier, at_once
        self._on_damage = on_damage
        self._clock = (events or Events()).reads
        try:
            self._data: LayerSource = source if unseal is None else unseal()
            metadata, places = self._parse()
            self._codec = get_codec(metadata["codec"])
            self.exact = self._codec.in_place and metadata.get(_EXACT) != "no"
            self.num_layers = int(metadata["layers"])
            self.num_tokens = int(metadata["tokens"])
            self.start = int(metadata["start"])
            self.nbytes, self.stored_nbytes = int(metadata["nbytes"]), self.source.nbytes
            self._checksums = [metadata[_checksum_name(index)] for index in range(self.num_layers)]
            self._layers: list[list[_Place]] = [[] for _ in range(self.num_layers)]
            self._static = next((place for place in places if place.name == _STATIC), None)
            self._static_checksum = metadata.get(_STATIC_CHECKSUM)
            self._read_static: torch.Tensor | None = None  # cached, because controller and blend both read it
            for place in sorted(place for place in places if place.name != _STATIC):
                self._layers[_layer_index(place.name)].append(place)
        except InputError as error:  # a newer version, for example, wrote the entry, so the entry stays
            raise UnknownCodecError(f"KV entry {key} counts as missing: {error} ({source.place})") from error
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._report(f"header: {error!r}") from error

    def layer(self, index: int) -> LayerKV:
        return self.layer_in(index, plain)

    def layer_in(self, index: int, take: Take) -> LayerKV:
        """See :meth:`StoredKV.layer_in`; without a codec's decoding the bytes are read directly into that memory."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} of an entry with {self.num_layers} layers")
        places = self._layers[index]
        try:
            with self._clock.reading(sum(place.nbytes for place in places)):
                tensors = self._checked(places, self._checksums[index], take if self._codec.in_place else plain)
                return self._codec.decode({name.split(".", 2)[2]: tensor for name, tensor in tensors.items()}, take)
        except ValueError as error:
            raise self._report(f"layer {index}: {error!r}") from error

    def static_deviation(self) -> torch.Tensor | None:
        """See :meth:`StoredKV.static_deviation`; a damaged static deviation leaves the layers usable."""
        if self._static is None or self._read_static is not None:
            return self._read_static
        try:
            (static,) = self._checked([self._static], self._static_checksum).values()
            if static.shape != (self.num_tokens,):
                raise ValueError(f"shape {list(static.shape)} for {self.num_tokens} tokens")
        except (ValueError, StoreUnavailableError) as error:
            _log.warning(
                "The static deviation of KV entry %s cannot be used: %s (%s)", self.key, repr(error), self.source.place
            )
            return None
        self._read_static = static
        return static

    def verify(self) -> None:
        """Read all layers and the static deviation, and compare their checksums.

        Raises:
            DamagedKVError: A checksum does not match.
            StoreUnavailableError: Some bytes cannot be read now.
        """
        for index in range(self.num_layers):
            self.layer(index)
        if self._static is not None:
            try:
                self._checked([self._static], self._static_checksum)
            except ValueError as error:
                raise self._report(f"static deviation: {error!r}") from error

    def _checked(self, places: Sequence[_Place], checksum: str | None, take: Take = plain) -> dict[str, torch.Tensor]:
        """Read tensors and return them by name; raise ValueError if ``checksum`` does not match.

        The tensors lie one behind the other in memory from ``take``, in the order of ``places``. If the source has the
        same layout, one read suffices, because each read of a remote source costs a round trip. An unreadable source
        raises StoreUnavailableError.
        """
        tensors: dict[str, torch.Tensor] = {}
        starts, end = [], 0
        for place in places:
            starts.append(end + -end % _DTYPES[place.dtype].itemsize)
            end = starts[-1] + place.nbytes
        memory = take(end)
        together = all(place.offset - places[0].offset == start for place, start in zip(places, starts, strict=True))
        if together and end:
            self._data.read(places[0].offset, memory[:end])
        for place, start in zip(places, starts, strict=True):
            data = memory[start : start + place.nbytes]
            if place.nbytes and not together:
                self._data.read(place.offset, data)
            tensors[place.name] = data.view(_DTYPES[place.dtype]).view(place.shape)
        if _checksum(tensors) != checksum:
            raise ValueError("checksum mismatch")
        return tensors

    def _report(self, what: str) -> DamagedKVError:
        place = self.source.place
        damage = DamagedKVError(f"KV entry {self.key} is damaged and counts as missing; {what} ({place})")
        self._on_damage(self, damage)
        return damage

    def _parse(self) -> tuple[dict[str, str], list[_Place]]:
        """Parse the header without safetensors, which would map the file. A damaged header raises various errors."""
        first = read_bytes(self._data, 0, 8)
        if first.startswith(SEALED):
            raise UnknownKeyError(
                f"KV entry {self.key} counts as missing, and stays: it is encrypted, and no keys are given ({self.source.place})"
            )
        (length,) = struct.unpack("<Q", first)
        if length > min(_MAX_HEADER, self._data.nbytes - 8):
            raise ValueError(f"header of {length} bytes in an entry of {self._data.nbytes}")
        header = json.loads(read_bytes(self._data, 8, length))
        metadata = header.pop("__metadata__")
        if metadata.pop("checksum") != _metadata_checksum(metadata):
            raise ValueError("checksum mismatch")
        if metadata["key"] != self.key:
            raise ValueError(f"holds {metadata['key']}, not {self.key}")
        if metadata["format"] != FORMAT:
            raise InputError(f"it is in the format {metadata['format']}, and this version reads {FORMAT}")
        places = [_place(name, entry, 8 + length) for name, entry in header.items()]
        end = max((place.offset + place.nbytes for place in places), default=8 + length)
        if end != self._data.nbytes:
            raise ValueError(f"{self._data.nbytes} bytes instead of {end}")
        return metadata, places


def _place(name: str, entry: Mapping[str, Any], data: int) -> _Place:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < _MOST for number in (begin, end, *shape)):
        raise ValueError("sizes that are not whole numbers")
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise ValueError(f"{end - begin} bytes for a tensor of {nbytes}")
    return _Place(name, dtype, shape, data + begin, nbytes)


def _name(index: int, tensor: str) -> str:
    # The index is zero-padded, because safetensors sorts by name and the order must be layer by layer.
    return f"layer.{index:05d}.{tensor}"


def _layer_index(name: str) -> int:
    return int(name.split(".", 2)[1])


def _checksum_name(index: int) -> str:
    return f"checksum.{index:05d}"


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the checksum of contiguous tensors in host memory, with their names, dtypes and shapes."""
    state = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        state.update(f"{name} {_DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(metadata, sort_keys=True).encode())


class EntryFormat:
    """Writes entries by one codec, encrypted or not, and reads entries of any codec.

    A tier stores the bytes and need not interpret them. Encryption is part of the format and does not wrap a tier,
    because each layer must stay one read: the parts of a file are encrypted separately.

    Attributes:
        codec: Codec of new entries.
        keys: Keys that encrypt the entries; None: no encryption. Entries that other keys encrypt are not read.
    """

    def __init__(self, codec: str = RAW, keys: Keyring | None = None):
        """Select the codec called ``codec`` for new entries (:func:`~cacheblend_rag.store.codec.get_codec`).

        Raises:
            InputError: No codec has that name.
        """
        self.codec, self.keys = get_codec(codec), keys

    def encode(self, key: KVKey, kv: ChunkKV) -> EncodedKV:
        """Encode every layer of ``kv``, without encryption, and compute the checksums.

        An entry with tensors that are not KV per token (the states of recurrent layers) is stored unchanged, by the
        codec ``raw``.

        Raises:
            InputError: A tensor has a dtype that the format does not support.
        """
        tensors: dict[str, torch.Tensor] = {}
        codec = self.codec
        if any(tensor.dim() != 3 or tensor.shape[1] != kv.num_tokens for layer in kv.layers for tensor in layer):
            codec = Codec(RAW)
        metadata = {
            "format": FORMAT,
            "key": key,
            "codec": codec.name,
            "layers": str(kv.num_layers),
            "tokens": str(kv.num_tokens),
            "start": str(kv.start),
            "nbytes": str(kv.nbytes),
        }
        if not kv.exact:
            metadata[_EXACT] = "no"
        taken: set[int] = set()
        for index in range(kv.num_layers):
            layer: dict[str, torch.Tensor] = {}
            for name, tensor in sorted(codec.encode(kv.layer(index)).items()):
                if tensor.dtype not in _DTYPE_NAMES:
                    raise InputError(f"KV of dtype {tensor.dtype} cannot be stored: use one of {', '.join(_DTYPES)}")
                flat = tensor.detach().to("cpu").contiguous()
                if flat.data_ptr() in taken:
                    flat = flat.clone()  # safetensors refuses tensors that share memory, as layers with shared KV do
                taken.add(flat.data_ptr())
                layer[_name(index, name)] = flat
            tensors |= layer
            metadata[_checksum_name(index)] = _checksum(layer)
        if (static := kv.static_deviation()) is not None:
            tensors[_STATIC] = static.detach().to("cpu", torch.float32).clone()
            metadata[_STATIC_CHECKSUM] = _checksum({_STATIC: tensors[_STATIC]})
        metadata["checksum"] = _metadata_checksum(metadata)
        return EncodedKV(tensors, metadata)

    def write(self, encoded: EncodedKV, path: Path) -> None:
        """Write an entry to ``path``. The write is neither atomic nor synced.

        Raises:
            OSError: The file cannot be written.
        """
        if self.keys is None:
            save_file(encoded.tensors, path, encoded.metadata)
        else:
            with path.open("wb") as file:
                for piece in _sealed(encoded, self.keys):
                    file.write(piece)

    def serialized(self, encoded: EncodedKV) -> bytes:
        """Return the bytes that :meth:`write` would write."""
        if self.keys is None:
            return save(encoded.tensors, encoded.metadata)
        return b"".join(map(bytes, _sealed(encoded, self.keys)))

    def open(
        self,
        source: LayerSource,
        key: KVKey,
        tier: str,
        on_damage: Callable[[KVFile, DamagedKVError], object],
        events: Events | None = None,
        at_once: int = 1,
    ) -> KVFile:
        """Open the entry in ``source``; see :class:`KVFile`."""
        unseal = None if self.keys is None else partial(SealedSource, source, key, self.keys)
        return KVFile(source, key, tier, on_damage, events, at_once, unseal)


def _sealed(encoded: EncodedKV, keys: Keyring) -> Iterator[memoryview]:
    data = save(encoded.tensors, encoded.metadata)
    return seal(data, parts_of(data), KVKey(encoded.metadata["key"]), keys)


PLAIN = EntryFormat()
"""Format without compression and encryption."""
