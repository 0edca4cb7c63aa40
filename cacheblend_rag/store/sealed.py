"""Encrypts entries: the bytes of an entry's file in parts, each by AES-256-GCM, so that each layer is still one read.

``docs/store.md`` describes the format.
"""

from __future__ import annotations

import secrets
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch

from cacheblend_rag.errors import UnknownKeyError
from cacheblend_rag.store.block import plain
from cacheblend_rag.store.keyring import Keyring, derived_key
from cacheblend_rag.store.kv import KVKey
from cacheblend_rag.store.source import LayerSource

MAGIC: Final = b"CBSEAL\x01\n"
"""How an encrypted entry begins; as the length of a safetensors header it would be impossible."""

_SALT_BYTES, _TAG_BYTES = 16, 16
_COUNT: Final = struct.Struct("<I")
_MOST_PARTS: Final = 1 << 20
_LARGEST_PART: Final = 1 << 30  # the library takes less than 2 GiB at once
_KEPT_BYTES: Final = 64 << 20
_scratch = threading.local()  # memory that is taken anew for each read costs more than decrypting
_FIRST: Final = len(MAGIC) + _SALT_BYTES + _COUNT.size


def seal(data: bytes, ends: Sequence[int], name: KVKey, keys: Keyring) -> Iterator[memoryview]:
    """Yield an entry encrypted, piece by piece; each piece is good until the next.

    Each entry has a key of its own, made from the namespace's, a random salt and the entry's name; under it every part has its
    number as nonce. So a nonce would come twice under one key only if a salt of 128 bits did, for the same name.

    Args:
        data: The entry's file.
        ends: Where its parts end; the last is the end of the file.
        name: The key that it is stored under.
        keys: The namespaces' keys.
    """
    cuts = [0]
    for end in ends:
        while end - cuts[-1] > _LARGEST_PART:
            cuts.append(cuts[-1] + _LARGEST_PART)
        cuts.append(end)
    sizes = [end - begin for begin, end in pairwise(cuts)]
    salt = secrets.token_bytes(_SALT_BYTES)
    prefix = MAGIC + salt + _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    cipher = _cipher(derived_key(keys.key_of(name)[0], salt, name))
    yield memoryview(prefix)
    plain_view, room = memoryview(data), memoryview(bytearray(max(sizes) + _TAG_BYTES))
    for number, (begin, end) in enumerate(pairwise(cuts)):
        sealed = room[: end - begin + _TAG_BYTES]
        cipher.encrypt_into(_nonce(number), plain_view[begin:end], prefix, sealed)
        yield sealed


class SealedSource:
    """Reads the bytes of an entry part by part from its encrypted ones; none is handed out that was not found genuine."""

    def __init__(self, sealed: LayerSource, name: KVKey, keys: Keyring):
        """Read and check the first part.

        Raises:
            ValueError: These are not the bytes that were stored under that name.
            UnknownKeyError: They are encrypted by another key, or not encrypted, so far as their name tells.
            StoreUnavailableError: They cannot be read now.
        """
        self._sealed, self.place = sealed, sealed.place
        key, certain = keys.key_of(name)
        try:
            self._open(key, name)
        except ValueError as error:
            if certain:
                raise
            raise UnknownKeyError(
                f"KV entry {name} counts as missing, and stays: it is not encrypted by a key in {keys.directory} ({self.place})"
            ) from error

    def _open(self, key: bytes, name: KVKey) -> None:
        first = self._bytes(0, _FIRST)
        count: int
        (count,) = _COUNT.unpack(first[-_COUNT.size :])
        if not first.startswith(MAGIC) or not 0 < count <= _MOST_PARTS:
            raise ValueError("not an encrypted entry")
        table = self._bytes(_FIRST, 8 * count)
        sizes = struct.unpack(f"<{count}Q", table)
        self._prefix = first + table
        self._begins = [0, *accumulate(sizes)]
        self.nbytes = self._begins[-1]
        if self._sealed.nbytes != len(self._prefix) + self.nbytes + _TAG_BYTES * count:
            raise ValueError(f"{self._sealed.nbytes} bytes, which are not those of its parts")
        self._cipher = _cipher(derived_key(key, first[len(MAGIC) : len(MAGIC) + _SALT_BYTES], name))
        self._opening = plain(sizes[0])
        self._decrypt(0, self._opening)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`; what is a part goes where it shall lie and nowhere else."""
        end = offset + len(into)
        if not 0 <= offset <= end <= self.nbytes:
            raise ValueError("the entry ends too early")
        number = bisect_right(self._begins, offset) - 1
        while offset < end:
            begin, part_end = self._begins[number], self._begins[number + 1]
            stop = min(end, part_end)
            target = into[len(into) - (end - offset) : len(into) - (end - stop)]
            if number == 0:
                target.copy_(self._opening[offset:stop])
            elif (offset, stop) == (begin, part_end):
                self._decrypt(number, target)
            else:
                whole = plain(part_end - begin)
                self._decrypt(number, whole)
                target.copy_(whole[offset - begin : stop - begin])
            offset, number = stop, number + 1

    def _decrypt(self, number: int, into: torch.Tensor) -> None:
        from cryptography.exceptions import InvalidTag

        data = _room(len(into) + _TAG_BYTES)
        self._sealed.read(len(self._prefix) + self._begins[number] + _TAG_BYTES * number, data)
        try:
            self._cipher.decrypt_into(_nonce(number), data.numpy().data, self._prefix, into.numpy().data)
        except InvalidTag:
            raise ValueError("it is not genuine: changed, or encrypted by another key") from None

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        if offset + nbytes > self._sealed.nbytes:
            raise ValueError(f"{self._sealed.nbytes} bytes, which is too few")
        data = plain(nbytes)
        self._sealed.read(offset, data)
        return data.numpy().tobytes()


def _room(nbytes: int) -> torch.Tensor:
    """Return memory ``[nbytes]``, uint8, that this thread uses for nothing else until it asks for more."""
    if nbytes > _KEPT_BYTES:
        return plain(nbytes)
    kept: torch.Tensor | None = getattr(_scratch, "memory", None)
    if kept is None or len(kept) < nbytes:
        kept = _scratch.memory = plain(nbytes)
    return kept[:nbytes]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
