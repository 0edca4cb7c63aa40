"""Turns entries into bytes and back for whoever keeps bytes: the one place that knows of codecs and of encryption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from safetensors.torch import save, save_file

from cacheblend_rag.errors import DamagedKVError, InputError, StoreError
from cacheblend_rag.store.codec import RAW, get_codec
from cacheblend_rag.store.directory import LOCK_TIMEOUT_S, EntryDirectory
from cacheblend_rag.store.events import Events
from cacheblend_rag.store.files import DEFAULT_NAME, explained
from cacheblend_rag.store.kv import ChunkKV, KVKey
from cacheblend_rag.store.kvfile import EncodedKV, KVFile, encode, parts_of
from cacheblend_rag.store.source import Keyring, LayerSource, SealedSource, seal


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
            InputError: There is no such codec, or the package that it takes is missing.
        """
        self.codec, self.keys = get_codec(codec), keys

    def encode(self, key: KVKey, kv: ChunkKV) -> EncodedKV:
        """Encode an entry, not encrypted yet; raises as :func:`~cacheblend_rag.store.kvfile.encode`."""
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
        """Return the entry whose bytes ``source`` has; see :class:`~cacheblend_rag.store.kvfile.KVFile`."""
        unseal = None if self.keys is None else partial(SealedSource, source, key, self.keys)
        return KVFile(source, key, tier, on_damage, events, at_once, unseal)

    def claim(self, directory: EntryDirectory) -> None:
        """See that the entries in a directory are encrypted by these keys, and note in an empty one that they are from now on.

        Raises:
            InputError: The keys lie in the store.
            StoreError: They are encrypted with others, or not at all, or are and there are no keys; or it cannot be noted.
        """
        with explained(directory.path.parent, LOCK_TIMEOUT_S):
            noted = directory.noted_key()
            if self.keys is None:
                if noted is not None:
                    raise StoreError(
                        f"The KV in {directory.path} is encrypted: name the directory of its keys, by --encrypt KEYS or in the "
                        "address, as file:///kv?encrypt=KEYS."
                    )
                return
            place, own = self.keys.directory, self.keys.name(DEFAULT_NAME).id
            if place.resolve().is_relative_to(directory.path.parent.resolve()):
                raise InputError(
                    f"The keys in {place} would lie in the store that they encrypt, and who has it would have them. "
                    "Move them elsewhere."
                )
            if noted is None:
                with directory.exclusive():
                    if directory.scan():
                        raise StoreError(
                            f"{directory.path} holds KV that is not encrypted, and would stay so. Delete that directory (KV is "
                            "computed anew, documents stay indexed), or give another one."
                        )
                    directory.note_key(own)
            elif noted != own:
                raise StoreError(
                    f"The KV in {directory.path} is encrypted by the key {noted}, and {place} holds the key {own}. Name the "
                    "directory with the right one; if it is lost, delete the KV, which is computed anew."
                )


def _sealed(encoded: EncodedKV, keys: Keyring) -> Iterator[memoryview]:
    data = save(encoded.tensors, encoded.metadata)
    return seal(data, parts_of(data), KVKey(encoded.metadata["key"]), keys)


PLAIN = EntryFormat()
"""Entries as they are, not encrypted."""
