"""Turns KV entries into bytes and back: safetensors files, encrypted or not, whose every byte is checked before it is believed.

``docs/store.md`` describes the format. Nothing here knows of budgets, locks or directories, and nothing else of codecs.
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
"""Written into every file; a change of the layout needs a new number, and leaves where this, the key and the checksum stand."""

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
_MOST = 1 << 48  # of a size; PyTorch fails otherwise where some sizes are as large and another is 0
_MAX_HEADER = 100_000_000  # what the safetensors library accepts; a flipped length must not make us allocate more


class EncodedKV(NamedTuple):
    """Holds an entry ready to be written: named tensors in host memory, and the metadata that protects them."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes; the file is larger by its header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def encode(key: KVKey, kv: ChunkKV, codec: Codec) -> EncodedKV:
    """Encode every layer of ``kv`` and compute the checksums.

    What is not KV of each token stays exact: an entry with states of recurrent layers is a snapshot of all of them.

    Raises:
        InputError: A tensor has a dtype that the format has no name for.
    """
    tensors: dict[str, torch.Tensor] = {}
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
        state = xxhash.xxh3_128()
        for name, tensor in sorted(codec.encode(kv.layer(index)).items()):
            if tensor.dtype not in _DTYPE_NAMES:
                raise InputError(f"KV of dtype {tensor.dtype} cannot be stored: use one of {', '.join(_DTYPES)}")
            flat = tensor.detach().to("cpu").contiguous()
            if flat.data_ptr() in taken:
                flat = flat.clone()  # safetensors refuses tensors that are one in memory, as layers with shared KV are
            taken.add(flat.data_ptr())
            full_name = _name(index, name)
            tensors[full_name] = flat
            _update(state, full_name, _DTYPE_NAMES[flat.dtype], list(flat.shape), flat.reshape(-1).view(torch.uint8))
        metadata[_checksum_name(index)] = state.hexdigest()
    if (static := kv.static_deviation()) is not None:
        state = xxhash.xxh3_128()
        tensors[_STATIC] = flat = static.detach().to("cpu", torch.float32).clone()
        _update(state, _STATIC, _DTYPE_NAMES[flat.dtype], list(flat.shape), flat.view(torch.uint8))
        metadata[_STATIC_CHECKSUM] = state.hexdigest()
    metadata["checksum"] = _metadata_checksum(metadata)
    return EncodedKV(tensors, metadata)


def parts_of(data: bytes) -> list[int]:
    """Return where the parts of a file end that are read alone: its header, each layer's tensors that lie together, the rest."""
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
    """Describes a tensor in the file: what it is, and where it lies, in bytes from the file's beginning."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class KVFile(StoredKV):
    """Reads a KV entry from its source, one layer at a time, each into memory that the reader gives, and checks it there."""

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
        """Read and check everything but the layers.

        Args:
            source: The entry's bytes.
            key: The key that it must hold.
            tier: See :class:`StoredKV`.
            on_damage: Called with the handle and the error, here or from :meth:`layer`, before the error is raised.
            events: Where to count reads of layers.
            at_once: See :class:`StoredKV`.
            unseal: Opens an encrypted entry: returns the bytes in it, and raises as this does or ValueError; None for one that is
                not encrypted.

        Raises:
            DamagedKVError: These bytes are not a whole entry of ``key``.
            StoreUnavailableError: They cannot be read now.
            UnknownCodecError: They are in a format or a codec that is not known here.
            UnknownKeyError: They are encrypted by another key, or are and there is no ``unseal``.
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
            self._read_static: torch.Tensor | None = None  # the controller asks for it, and then the blend
            for place in sorted(place for place in places if place.name != _STATIC):
                self._layers[_layer_index(place.name)].append(place)
        except InputError as error:  # by a newer version, say: it stays for those who know it
            raise UnknownCodecError(f"KV entry {key} counts as missing: {error} ({source.place})") from error
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._report(f"header: {error!r}") from error

    def layer(self, index: int) -> LayerKV:
        return self.layer_in(index, plain)

    def layer_in(self, index: int, take: Take) -> LayerKV:
        """See :meth:`StoredKV.layer_in`; stored bytes that are the layer itself go there and nowhere else."""
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
        """See :meth:`StoredKV.static_deviation`; damage to it leaves the layers as good as they were."""
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
        """Read everything against its checksums.

        Raises:
            DamagedKVError: Something does not match.
            StoreUnavailableError: Something cannot be read now.
        """
        for index in range(self.num_layers):
            self.layer(index)
        if self._static is not None:
            try:
                self._checked([self._static], self._static_checksum)
            except ValueError as error:
                raise self._report(f"static deviation: {error!r}") from error

    def _checked(self, places: Sequence[_Place], checksum: str | None, take: Take = plain) -> dict[str, torch.Tensor]:
        """Read tensors by name; raise ValueError unless they have that checksum, StoreUnavailableError if they cannot be read.

        They come to lie one behind the other, as ``places`` are in order, in memory from ``take``; what lies so in the source,
        too, is read at once: from far away each read costs a round trip.
        """
        state = xxhash.xxh3_128()
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
            _update(state, place.name, place.dtype, place.shape, data)
            tensors[place.name] = data.view(_DTYPES[place.dtype]).view(place.shape)
        if state.hexdigest() != checksum:
            raise ValueError("checksum mismatch")
        return tensors

    def _report(self, what: str) -> DamagedKVError:
        place = self.source.place
        damage = DamagedKVError(f"KV entry {self.key} is damaged and counts as missing; {what} ({place})")
        self._on_damage(self, damage)
        return damage

    def _parse(self) -> tuple[dict[str, str], list[_Place]]:
        """Read the header ourselves: the library would map the file, see the class. Raises what a broken one causes."""
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
    # Zero-padded, because the library sorts by name: sorted must mean layer by layer.
    return f"layer.{index:05d}.{tensor}"


def _layer_index(name: str) -> int:
    return int(name.split(".", 2)[1])


def _checksum_name(index: int) -> str:
    return f"checksum.{index:05d}"


def _update(state: xxhash.xxh3_128, name: str, dtype: str, shape: list[int], data: torch.Tensor) -> None:
    state.update(f"{name} {dtype} {shape}\n".encode())
    state.update(data.numpy().data)


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(metadata, sort_keys=True).encode())


class EntryFormat:
    """Writes entries by a codec, encrypted or not, and reads those of any codec.

    A tier is given one and hands it bytes; it need not know what they mean. Encryption is no wrapper of tiers, because each
    layer must stay one read: the parts of a file are encrypted one by one.

    Attributes:
        codec: How new entries are encoded.
        keys: What entries are encrypted with; None for not at all. Others are not read.
    """

    def __init__(self, codec: str = RAW, keys: Keyring | None = None):
        """Write by the codec called ``codec`` (:func:`~cacheblend_rag.store.codec.get_codec`).

        Raises:
            InputError: There is no such codec.
        """
        self.codec, self.keys = get_codec(codec), keys

    def encode(self, key: KVKey, kv: ChunkKV) -> EncodedKV:
        """Encode an entry, not encrypted yet; raises as :func:`encode`."""
        return encode(key, kv, self.codec)

    def write(self, encoded: EncodedKV, path: Path) -> None:
        """Write an entry to ``path``; neither atomic nor synced.

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
        """Return the entry whose bytes ``source`` has; see :class:`KVFile`."""
        unseal = None if self.keys is None else partial(SealedSource, source, key, self.keys)
        return KVFile(source, key, tier, on_damage, events, at_once, unseal)


def _sealed(encoded: EncodedKV, keys: Keyring) -> Iterator[memoryview]:
    data = save(encoded.tensors, encoded.metadata)
    return seal(data, parts_of(data), KVKey(encoded.metadata["key"]), keys)


PLAIN = EntryFormat()
"""Entries as they are, not encrypted."""
