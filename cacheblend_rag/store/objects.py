"""Stores entries in an object store, such as S3."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Unpack

from obstore.exceptions import BaseError, PreconditionError
from obstore.store import from_url

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.base import TIMEOUT_S, EntryInfo
from cacheblend_rag.store.calls import WRITE_FACTOR
from cacheblend_rag.store.kv import KVKey, checked_key, is_key
from cacheblend_rag.store.remote import Head, RemoteOptions, RemoteStore, Written

_FOLDER, _ENDING = "kv", ".safetensors"
_A_TIME: Final = 1000
_NO_SUCH_RANGE: Final = re.compile(r"\b416\b|invalid ?range", re.IGNORECASE)


class ObjectStore(RemoteStore):
    """Stores KV entries as the objects ``kv/<first 2 hex digits>/<key>.safetensors`` of a bucket.

    An object store records no times of use and no totals. An entry's last use is the last use by this client, or else
    the time of the put. A client with a budget lists the bucket before its first put and before an eviction, and adds
    up its own puts in between. The client does not see the puts of other clients since the last listing.
    """

    def __init__(
        self,
        bucket: Any,
        budget: int | None = None,
        *,
        writer: Any = None,
        where: str = "",
        **options: Unpack[RemoteOptions],
    ):
        """Use ``bucket``, one of obstore's stores, which connects on first use. See :meth:`at`.

        Args:
            bucket: Store object for reading.
            budget: See :class:`KVStore`.
            writer: Store object with longer timeouts, for slow calls; None for ``bucket``.
            where: See :class:`RemoteStore`.
            options: See :class:`RemoteStore`. Entries older than ``ttl_s`` count as missing, and are deleted when the
                bucket is listed.
        """
        options.setdefault("tier", "s3")
        super().__init__(where or type(bucket).__name__, (BaseError, OSError), budget, **options)
        self._bucket, self._writer = bucket, writer or bucket
        self._room = threading.Lock()
        self._seen_used: dict[KVKey, float] = {}
        self._nbytes: int | None = None  # bytes in the bucket as this client has counted them; None: not listed yet

    @classmethod
    def at(
        cls,
        url: str,
        budget: int | None = None,
        config: Mapping[str, str] | None = None,
        **options: Unpack[RemoteOptions],
    ) -> ObjectStore:
        """Return the tier at ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://account/container/prefix``.

        Args:
            url: Address of the tier. Credentials come from the same environment variables as for the provider's own
                tools.
            budget: See :class:`KVStore`.
            config: Options of obstore by name: ``endpoint``, ``region``...
            options: See :class:`RemoteStore`.

        Raises:
            InputError: obstore does not accept ``url`` or ``config``.
        """
        config, timeout_s = config or {}, options.get("timeout_s", TIMEOUT_S)

        def bucket(timeout_s: float) -> Any:
            return opened(
                url,
                client_options={
                    "timeout": f"{timeout_s * 1000:.0f}ms",
                    "connect_timeout": f"{min(timeout_s, TIMEOUT_S) * 1000:.0f}ms",
                    "allow_http": config.get("endpoint", "").startswith("http://"),
                },
                retry_config={"max_retries": 0},  # computing the prompt is faster than waiting for a failing bucket
                **config,
            )

        opened: Any = from_url  # typed as Any, because the options depend on the scheme
        try:
            reader, writer = bucket(timeout_s), bucket(timeout_s * WRITE_FACTOR)
        except (BaseError, ValueError, TypeError) as error:
            raise InputError(f"{url!r} is no address of an object store: {error}") from error
        return cls(reader, budget, writer=writer, where=url, **options)

    def _head(self, key: KVKey, nbytes: int, use: bool = True) -> Head | None:
        try:
            found = self._bucket.get(_path(key), options={"range": (0, nbytes)})
            meta, data = found.meta, memoryview(found.bytes())
        except FileNotFoundError:
            return None
        except BaseError as error:
            if not _NO_SUCH_RANGE.search(str(error)):
                raise
            # An object of 0 bytes satisfies no range request. The entry is damaged, and the tier works.
            meta, data = self._bucket.head(_path(key)), memoryview(b"")
        if self._has_expired(meta):
            return None
        if use:
            self._seen_used[key] = time.time()
        return Head(meta["size"], meta["e_tag"] or "", data)

    def _range(self, key: KVKey, version: str, offset: int, nbytes: int) -> memoryview | None:
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if version:
            options["if_match"] = version
        try:
            return memoryview(self._bucket.get(_path(key), options=options).bytes())
        except (FileNotFoundError, PreconditionError):
            return None

    def _write(self, key: KVKey, data: bytes, replace: bool) -> Written:
        with self._room:  # puts of this client run one at a time, so that the count stays right
            evicted = 0
            if self.budget is not None and (self._nbytes is None or self._nbytes + len(data) > self.budget):
                others = [entry for entry in self._list() if entry.key != key]  # the replaced entry makes room itself
                evicted = self._evict_of(others, self.budget - len(data))[1]
            self._writer.put(_path(key), data)
            self._seen_used[key] = time.time()
            if self._nbytes is not None:
                self._nbytes += len(data)
            return Written(True, evicted)

    def _evict_of(self, entries: list[EntryInfo], to_bytes: int) -> tuple[int, int]:
        self._nbytes = before = sum(entry.nbytes for entry in entries)
        count = 0
        for entry in sorted(entries, key=lambda entry: entry.last_used):
            if self._nbytes <= to_bytes:
                break
            self._writer.delete(_path(entry.key))
            self._seen_used.pop(entry.key, None)
            self._nbytes -= entry.nbytes
            count += 1
        return before - self._nbytes, count

    def touch(self, key: KVKey) -> None:
        """See :meth:`KVStore.touch`; the call sends no request."""
        self._seen_used[checked_key(key)] = time.time()

    def _meta(self, key: KVKey) -> Any:
        try:
            meta = self._bucket.head(_path(key))
        except FileNotFoundError:
            return None
        return None if self._has_expired(meta) else meta

    def _remove(self, key: KVKey, version: str | None) -> bool:
        meta = self._meta(key)
        if meta is None or (version and meta["e_tag"] != version):
            return False
        self._bucket.delete(_path(key))
        with self._room:
            self._seen_used.pop(key, None)
            if self._nbytes is not None:
                self._nbytes -= meta["size"]
        return True

    def _list(self) -> list[EntryInfo]:
        found = []
        for batch in self._writer.list(f"{_FOLDER}/", chunk_size=_A_TIME):
            for meta in batch:
                key = KVKey(meta["path"].rpartition("/")[2].removesuffix(_ENDING))
                if not is_key(key):
                    continue
                if self._has_expired(meta):
                    self._writer.delete(meta["path"])
                    self._seen_used.pop(key, None)
                    continue
                found.append(self._described(key, meta))
        return found

    def _info(self, key: KVKey) -> EntryInfo | None:
        meta = self._meta(key)
        return None if meta is None else self._described(key, meta)

    def _described(self, key: KVKey, meta: Any) -> EntryInfo:
        used = max(meta["last_modified"].timestamp(), self._seen_used.get(key, 0.0))
        return EntryInfo(key, meta["size"], self.tier, used)

    def _evict(self, to_bytes: int) -> tuple[int, int]:
        with self._room:
            return self._evict_of(self._list(), to_bytes)

    def _has_expired(self, meta: Any) -> bool:
        return self._ttl_s is not None and meta["last_modified"].timestamp() + self._ttl_s <= time.time()


def _path(key: KVKey) -> str:
    return f"{_FOLDER}/{key[:2]}/{key}{_ENDING}"
