"""Reads the bytes of an entry. AES-256-GCM can encrypt each part separately, so that each layer is one read.

``docs/store.md`` describes the format.
"""

from __future__ import annotations

import re
import secrets
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from cacheblend_rag.errors import InputError, UnknownKeyError
from cacheblend_rag.homes import from_home
from cacheblend_rag.store.files import DEFAULT_NAME, Namespace, make_root
from cacheblend_rag.store.kv import KeyName, KVKey, plain


class LayerSource(Protocol):
    """Provides the bytes of one entry from any medium, to any thread.

    Attributes:
        nbytes: Number of bytes.
        place: Location of the bytes, for messages.
    """

    nbytes: int
    place: str

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into``, ``[n]``, uint8, contiguous, with the bytes from ``offset`` on.

        Raises:
            ValueError: The entry has too few bytes: it is damaged.
            StoreUnavailableError: The bytes cannot be read now; the entry may be intact.
        """


def read_bytes(source: LayerSource, offset: int, nbytes: int) -> bytes:
    """Return ``nbytes`` of ``source`` from ``offset`` on; raises as :meth:`LayerSource.read`."""
    if offset + nbytes > source.nbytes:
        raise ValueError(f"{source.nbytes} bytes, which is too few")
    data = plain(nbytes)
    source.read(offset, data)
    return data.numpy().tobytes()


class BytesSource:
    """Holds an entry's bytes in memory."""

    def __init__(self, data: bytes, place: str):
        """Hold ``data`` that was read from ``place``."""
        self._data, self.nbytes, self.place = np.frombuffer(data, np.uint8), len(data), place

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`."""
        if offset + len(into) > self.nbytes:
            raise ValueError("the entry ends too early")
        into.numpy()[:] = self._data[offset : offset + len(into)]


_ENDING: Final = ".key"
_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_KEY_BYTES: Final = 32
_ID_DIGITS: Final = 16


class Keyring:
    """Holds the encryption keys of a directory: files ``<namespace>.key`` with 64 hex digits each.

    :func:`make_key` or ``openssl rand -hex 32`` writes such digits. An entry's name ends with the id of its encryption
    key. For an entry without the id of one of these keys, the default namespace's key is used.

    Attributes:
        directory: Directory that the keys were read from.
    """

    def __init__(self, keys: Mapping[str, bytes], directory: Path):
        """Hold keys of 32 bytes by namespace. The default namespace must have a key."""
        self.directory = directory
        self._default = keys[DEFAULT_NAME]
        self._names = {namespace: KeyName(_derived(key, "id").hex()[:_ID_DIGITS], _derived(key, "names").hex())
                       for namespace, key in keys.items()}  # fmt: skip
        self._by_id = {self._names[namespace].id: key for namespace, key in keys.items()}

    @classmethod
    def read(cls, directory: Path | str) -> Keyring:
        """Read the keys in a directory.

        Raises:
            InputError: The default namespace's key is missing, a file cannot be read or is no key, two namespaces have
                the same key, or a package is missing.
        """
        found = from_home(directory)
        keys: dict[str, bytes] = {}
        try:
            for file in sorted(found.glob(f"*{_ENDING}")):
                text = file.read_text(encoding="ascii", errors="replace").strip()
                if not _KEY.fullmatch(text):
                    raise InputError(
                        f"{file} is no key: it must hold 64 hex digits, as `openssl rand -hex 32` writes them."
                    )
                keys[Namespace(file.name.removesuffix(_ENDING)).name] = bytes.fromhex(text)
        except OSError as error:
            raise InputError(f"The keys in {found} cannot be read: {error}.") from error
        if DEFAULT_NAME not in keys:
            raise InputError(
                f"{found} holds no {DEFAULT_NAME}{_ENDING}, without which the store's KV can neither be read nor written. If it "
                f"is elsewhere, name its directory; for a new store make one: cacheblend store keygen {found}"
            )
        if len(set(keys.values())) < len(keys):
            raise InputError(f"Two tenants have the same key in {found}; give each its own.")
        return cls(keys, found)

    def name(self, namespace: str) -> KeyName:
        """Return the parts that a namespace's encryption key adds to the KV keys of the namespace's entries.

        Raises:
            InputError: The namespace has no encryption key.
        """
        if namespace not in self._names:
            raise InputError(
                f"The store is encrypted, and {self.directory} holds no key of the tenant {namespace!r}: "
                f"make one with cacheblend store keygen {self.directory} --tenant {namespace}"
            )
        return self._names[namespace]

    def key_of(self, name: KVKey) -> tuple[bytes, bool]:
        """Return the encryption key of the entry ``name``, and whether ``name`` ends with the id of the key."""
        found = self._by_id.get(name[-_ID_DIGITS:])
        return (self._default, False) if found is None else (found, True)


def make_key(directory: Path, namespace: str = DEFAULT_NAME) -> Path:
    """Make a namespace's encryption key in a directory, readable by this user only, and return the file.

    Raises:
        InputError: The key exists, the namespace's name is invalid, or the directory cannot be written to.
    """
    file = from_home(directory) / f"{Namespace(namespace).name}{_ENDING}"
    try:
        make_root(file.parent)
        file.touch(0o600, exist_ok=False)
        file.write_text(secrets.token_hex(_KEY_BYTES) + "\n", encoding="ascii")
    except FileExistsError as error:
        raise InputError(
            f"{file} exists already, and is not replaced, since what it has encrypted could not be read any more. "
            "To destroy it, remove it first."
        ) from error
    except OSError as error:
        with suppress(OSError):
            if file.is_file() and not file.stat().st_size:
                file.unlink()  # removes the empty file
        raise InputError(f"The key {file} cannot be written: {error}.") from error
    return file


def _derived(key: bytes, purpose: str, salt: bytes | None = None) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise InputError(
            f"An encrypted store needs a package that is missing ({error}): pip install 'cacheblend-rag[encryption]'"
        ) from error
    return HKDF(SHA256(), _KEY_BYTES, salt, f"cacheblend-kv/1 {purpose}".encode()).derive(key)


SEALED: Final = b"CBSEAL"
"""First bytes of an encrypted entry. As the length of a safetensors header the bytes would be impossible."""
MAGIC: Final = SEALED + b"\x01\n"
""":data:`SEALED` with the version of the encrypted format."""

_SALT_BYTES, _TAG_BYTES = 16, 16
_COUNT: Final = struct.Struct("<I")
_MOST_PARTS: Final = 1 << 20
_LARGEST_PART: Final = 1 << 30  # the cryptography library accepts less than 2 GiB in one call
_KEPT_BYTES: Final = 64 << 20
_scratch = threading.local()  # memory is reused, because allocating memory for each read costs more than decrypting
_FIRST: Final = len(MAGIC) + _SALT_BYTES + _COUNT.size


def seal(data: bytes, ends: Sequence[int], name: KVKey, keys: Keyring) -> Iterator[memoryview]:
    """Encrypt an entry and yield the bytes piece by piece; each piece is valid until the next piece is requested.

    Each entry has its own key, derived from the namespace's key, a random salt and the entry's name. The nonce of a
    part is the part's number. A nonce could therefore repeat under one key only if a salt of 128 bits repeated for the
    same name. ``data`` is the entry's file, and ``ends`` are the end offsets of its parts; the last end is the end of
    ``data``.
    """
    cuts = [0]
    for end in ends:
        while end - cuts[-1] > _LARGEST_PART:
            cuts.append(cuts[-1] + _LARGEST_PART)
        cuts.append(end)
    sizes = [end - begin for begin, end in pairwise(cuts)]
    salt = secrets.token_bytes(_SALT_BYTES)
    prefix = MAGIC + salt + _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    cipher = _cipher(_derived(keys.key_of(name)[0], f"entry {name}", salt))
    yield memoryview(prefix)
    plain_view, room = memoryview(data), memoryview(bytearray(max(sizes) + _TAG_BYTES))
    for number, (begin, end) in enumerate(pairwise(cuts)):
        sealed = room[: end - begin + _TAG_BYTES]
        cipher.encrypt_into(_nonce(number), plain_view[begin:end], prefix, sealed)
        yield sealed


class SealedSource:
    """Decrypts the bytes of an entry part by part, and returns only bytes of parts that have passed authentication."""

    def __init__(self, sealed: LayerSource, name: KVKey, keys: Keyring):
        """Read and check the first part.

        Raises:
            ValueError: The bytes are not the bytes that were stored under ``name``.
            InputError: The bytes are encrypted in another version's format.
            UnknownKeyError: The bytes cannot be decrypted, and ``name`` does not end with the id of one of ``keys``.
            StoreUnavailableError: The bytes cannot be read now.
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
        first = read_bytes(self._sealed, 0, _FIRST)
        count: int
        (count,) = _COUNT.unpack(first[-_COUNT.size :])
        if first.startswith(SEALED) and not first.startswith(MAGIC):
            raise InputError("it is encrypted in another version's way")
        if not first.startswith(MAGIC) or not 0 < count <= _MOST_PARTS:
            raise ValueError("not an encrypted entry")
        table = read_bytes(self._sealed, _FIRST, 8 * count)
        sizes = struct.unpack(f"<{count}Q", table)
        self._prefix = first + table
        self._begins = [0, *accumulate(sizes)]
        self.nbytes = self._begins[-1]
        if self._sealed.nbytes != len(self._prefix) + self.nbytes + _TAG_BYTES * count:
            raise ValueError(f"{self._sealed.nbytes} bytes, which are not those of its parts")
        self._cipher = _cipher(_derived(key, f"entry {name}", first[len(MAGIC) : len(MAGIC) + _SALT_BYTES]))
        self._opening = plain(sizes[0])
        self._decrypt(0, self._opening)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`; a range that is a whole part is decrypted directly into ``into``."""
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


def _room(nbytes: int) -> torch.Tensor:
    """Return scratch memory ``[nbytes]``, uint8, valid until this thread calls the function again."""
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
