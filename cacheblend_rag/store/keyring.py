"""Reads and makes the keys that KV is encrypted with at rest: one for each namespace, a file each."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import KeyName, KVKey
from cacheblend_rag.store.namespace import DEFAULT_NAME, Namespace
from cacheblend_rag.store.private import make_root

_ENDING: Final = ".key"
_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_KEY_BYTES: Final = 32
_ID_DIGITS: Final = 16


class Keyring:
    """Holds the keys in a directory: ``<namespace>.key``, 64 hex digits each.

    So :func:`make_key` or ``openssl rand -hex 32`` writes them.

    An entry's name says by which key it is encrypted. One that names none of these is the default namespace's.

    Attributes:
        directory: Where they were read from.
    """

    def __init__(self, keys: Mapping[str, bytes], directory: Path):
        """Hold keys of 32 bytes by namespace; the default namespace's is among them."""
        self.directory = directory
        self._default = keys[DEFAULT_NAME]
        self._names = {namespace: KeyName(_derived(key, "id").hex()[:_ID_DIGITS], _derived(key, "names").hex())
                       for namespace, key in keys.items()}  # fmt: skip
        self._by_id = {self._names[namespace].id: key for namespace, key in keys.items()}

    @classmethod
    def read(cls, directory: Path | str) -> Keyring:
        """Read the keys in a directory.

        Raises:
            InputError: There are none, the default one is missing, one cannot be read or is no key, or a package is missing.
        """
        found = Path(directory).expanduser()
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
        """Return what a namespace's key gives to the names of its entries.

        Raises:
            InputError: It has no key.
        """
        if namespace not in self._names:
            raise InputError(
                f"The store is encrypted, and {self.directory} holds no key of the tenant {namespace!r}: "
                f"make one with cacheblend store keygen {self.directory} --tenant {namespace}"
            )
        return self._names[namespace]

    def key_of(self, name: KVKey) -> tuple[bytes, bool]:
        """Return the key of the entry called ``name``, and whether its name says so."""
        found = self._by_id.get(name[-_ID_DIGITS:])
        return (self._default, False) if found is None else (found, True)


def make_key(directory: Path, namespace: str = DEFAULT_NAME) -> Path:
    """Make a namespace's key in a directory, for this user alone, and return its file.

    Raises:
        InputError: There is one, the name cannot be a namespace's, or the directory cannot be written to.
    """
    file = directory.expanduser() / f"{Namespace(namespace).name}{_ENDING}"
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
                file.unlink()  # half a key is none
        raise InputError(f"The key {file} cannot be written: {error}.") from error
    return file


def derived_key(key: bytes, salt: bytes, name: KVKey) -> bytes:
    """Return the key of 32 bytes for one entry, which no other name or salt has."""
    return _derived(key, f"entry {name}", salt)


def _derived(key: bytes, purpose: str, salt: bytes | None = None) -> bytes:
    hkdf, sha256 = _hkdf()
    found: bytes = hkdf(sha256(), _KEY_BYTES, salt, f"cacheblend-kv/1 {purpose}".encode()).derive(key)
    return found


def _hkdf() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise InputError(
            f"An encrypted store needs a package that is missing ({error}): pip install 'cacheblend-rag[encryption]'"
        ) from error
    return HKDF, SHA256
