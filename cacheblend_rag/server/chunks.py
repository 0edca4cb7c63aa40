"""Implements ``/v1/chunks`` without HTTP, with the catalogue, the registry and the KV store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk
from cacheblend_rag.protocol import MAX_METADATA, PrecomputeBody, first_problem
from cacheblend_rag.retrieval.registered import ConflictError
from cacheblend_rag.server.naming import tokens_match

if TYPE_CHECKING:
    from cacheblend_rag.engines.results import PrecomputeReport
    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.server.catalogue import ChunkCatalogue
    from cacheblend_rag.store.base import EntryInfo


_AT_ONCE = 256
"""Chunks that a deletion holds in memory at a time."""


class ServedChunks:
    """Reads, lists and deletes chunks together with their KV; the catalogue has no KV. Calls block."""

    def __init__(self, client: BlendClient, catalogue: ChunkCatalogue):
        self._client, self._catalogue = client, catalogue
        self._coming: Counter[str] = Counter()  # texts being registered, whose KV no deletion may remove
        self._lock = threading.Lock()
        self._readers: list[ServedChunks] = []

    def lend_to(self, reader: ServedChunks) -> None:
        """Make deletions also drop the KV that prompts of ``reader``, another tenant, have stored in its own namespace."""
        self._readers.append(reader)

    def read(self, body: bytes) -> tuple[list[Chunk], str]:
        """Return the chunks of a request's body, and the client that holds the chunks.

        The caller must pass the chunks to :meth:`settle`, even after a failure.

        Raises:
            InputError: The body is malformed, or a text cannot be a chunk.
            StoreError: There is no room for so many chunks.
        """
        try:
            parsed = PrecomputeBody.model_validate_json(body)
        except ValidationError as error:
            raise InputError(first_problem(error)) from None
        if bool(parsed.texts) == bool(parsed.chunks):
            raise InputError(
                'Give {"texts": ["...", ...]}, or {"chunks": [{"text": "..."}, ...]}; one of them, not empty.'
            )
        self._catalogue.refresh()
        pieces = [(each.text, each.id, each.token_ids, each.metadata) for each in parsed.chunks]
        pieces += [(text, None, None, {}) for text in parsed.texts]
        # Before tokenising: a request beyond the quota must not delay others.
        self._catalogue.check_room({chunk_id(text.strip()) if name is None else name for text, name, *_ in pieces})
        found: list[Chunk] = []
        for number, piece in enumerate(pieces):
            try:
                found.append(self._chunk(*piece))
            except ConflictError:
                raise
            except InputError as error:
                raise InputError(f"{'chunks' if parsed.chunks else 'texts'}.{number}: {error}") from error
        texts: dict[str, str] = {}
        for number, chunk in enumerate(found):
            if texts.setdefault(chunk.id, chunk.text) != chunk.text:
                raise InputError(
                    f"chunks.{number}: the id {chunk.id!r} has another text further up. Give each text its own."
                )
        with self._lock:
            self._coming.update(set(texts.values()))
        return found, parsed.holder

    def to_compute(self, chunks: Iterable[Chunk]) -> int:
        """Return how many tokens of the chunks have no stored KV; 0 for a model that is not blended."""
        if not self._client.gate.passed:
            return 0
        texts = {chunk.token_ids for chunk in chunks}
        return sum(len(token_ids) for token_ids in texts if not self._client.entries.contains(token_ids))

    def keep(self, chunks: list[Chunk], report: PrecomputeReport, holder: str = "") -> None:
        """Register the chunks whose KV is stored; all chunks if the model is not blended.

        Raises:
            ConflictError: Another request has given an id to another text meanwhile; no chunk is registered.
            StoreError: The chunks cannot be written, are too many or have too much KV; no chunk is registered.
        """
        failed = report.failed if self._client.gate.passed else {}
        kept = [chunk for chunk in {c.id: c for c in chunks}.values() if chunk.id not in failed]
        self._catalogue.add(
            kept, {chunk.id: sum(entry.nbytes for entry in self._stored(chunk)) for chunk in kept}, holder
        )

    def settle(self, chunks: Sequence[Chunk]) -> None:
        """Finish the work that :meth:`read` began: drop the KV of chunks that have not been registered."""
        with self._lock:
            self._coming -= Counter({chunk.text for chunk in chunks})
        self._drop_unregistered(chunks)

    def _drop_unregistered(self, chunks: Iterable[Chunk]) -> None:
        registry = self._client.registry
        known = ((chunk, registry.get(chunk.id)) for chunk in chunks)
        # A chunk of another tenant has KV in that tenant's namespace.
        self._drop_kv(c for c, now in known if now is None or now.text != c.text or registry.is_lent(c.id))

    def _stored(self, chunk: Chunk) -> list[EntryInfo]:
        """Return the store's entries of a chunk in the tenant's own namespace."""
        found = map(self._client.store.entry, self._client.entries.keys(chunk.token_ids))
        return [entry for entry in found if entry is not None]

    def _chunk(
        self, text: str, name: str | None, token_ids: tuple[int, ...] | None, metadata: Mapping[str, Any]
    ) -> Chunk:
        if name == "stats":
            raise InputError(
                "the id 'stats' is the name of a route, GET /v1/chunks/stats, which would hide the chunk. Use another id."
            )
        chunk = make_chunk(text, self._client.tokenizer)
        chunk = Chunk(name or chunk.id, chunk.text, chunk.token_ids, metadata)
        if chunk.metadata_bytes > MAX_METADATA:
            raise InputError(
                f"its metadata have {chunk.metadata_bytes} bytes, as JSON; {MAX_METADATA} are allowed. Leave out what is long."
            )
        if token_ids is not None and not tokens_match(self._client.tokenizer, text, token_ids):
            raise InputError(
                "token_ids are not those of this text in the server's tokenizer; cut chunks with that tokenizer, or leave "
                "token_ids out."
            )
        room = self._client.context_window - len(self._client.header_ids) - 1
        if len(chunk.token_ids) > room:
            raise InputError(
                f"it has {len(chunk.token_ids)} tokens; the context window leaves room for {room}. Split it."
            )
        if name is None:
            return chunk
        known = self._client.registry.get(chunk.id)
        # A chunk that only came with a prompt, or belongs to another tenant, does not reserve its id.
        claimed = known is not None and known.text != chunk.text
        if claimed and self._catalogue.origin(chunk.id) in ("registered", "index"):
            raise ConflictError.of_id(chunk.id)
        return chunk

    def known(self, chunk_id: str) -> Chunk:
        """Return the chunk with an id; raises UnknownChunkError if there is none."""
        self._catalogue.refresh()
        chunk = self._client.registry.get(chunk_id)
        if chunk is None:
            raise UnknownChunkError(f"No chunk has the id {chunk_id!r}.")
        return chunk

    def page(self, limit: int, after: str | None) -> tuple[list[dict[str, Any]], bool]:
        """Return the descriptions (:meth:`describe`) of up to ``limit`` chunks after an id, and whether more chunks follow."""
        self._catalogue.refresh()
        found = list(map(self.describe, islice(self._client.registry.since(after or ""), limit + 1)))
        return found[:limit], len(found) > limit

    def describe(self, chunk: Chunk) -> dict[str, Any]:
        """Return a chunk's fields in a listing: size, origin, whether its KV is stored."""
        found = self._stored(chunk)
        return {
            "id": chunk.id,
            "object": "chunk",
            "tokens": len(chunk.token_ids),
            "origin": self._catalogue.origin(chunk.id) or "prompt",
            "source": str(chunk.metadata.get("source", "")),
            "stored": self._client.entries.contains(chunk.token_ids),
            "bytes": sum(entry.nbytes for entry in found) if found else None,
            "last_used": max(entry.last_used for entry in found) if found else None,
        }

    def delete(self, wanted: list[Chunk]) -> None:
        """Remove chunks, and delete their KV unless another id has the same text.

        Raises:
            ConflictError: A chunk belongs to the index, or is shared by another tenant.
        """
        for chunk in wanted:
            origin = self._catalogue.origin(chunk.id)
            if origin == "shared":
                raise ConflictError(
                    f"The chunk {chunk.id} is shared by another tenant, whose keys alone can delete it."
                )
            if origin == "index":
                raise ConflictError(
                    f"The chunk {chunk.id} is part of the index in the server's store; change that with `cacheblend index`. "
                    "Its KV alone is dropped by `cacheblend store rm`."
                )
        self._catalogue.remove([chunk.id for chunk in wanted])
        self._drop_everywhere(wanted)

    def _drop_kv(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            with self._lock:
                if not self._coming[chunk.text] and not self._client.registry.others_have(chunk):
                    self._client.entries.delete(chunk.token_ids)

    def _drop_everywhere(self, chunks: Sequence[Chunk]) -> None:
        self._drop_kv(chunks)
        for reader in self._readers:
            reader._drop_unregistered(chunks)

    def expire(self) -> None:
        """Remove the chunks that have expired, and delete their KV."""
        gone = self._catalogue.expire()
        self._drop_everywhere([chunk for chunk in gone if self._catalogue.origin(chunk.id) != "index"])

    def delete_named(self, names: list[str], everything: bool, holder: str | None = None) -> list[str]:
        """Delete the registered chunks with these ids, or ``everything``; return the ids of the deleted chunks.

        With a ``holder``, only this client releases the chunks, and chunks that other clients hold stay. None deletes the chunks,
        whoever holds them.
        """
        self._catalogue.refresh(force=True)
        if holder is not None:
            names = self._catalogue.release(names, holder)
        named = iter(self._client.registry) if everything else map(self._client.registry.get, dict.fromkeys(names))
        kept, gone = ("index", "shared"), list[str]()
        while some := list(islice(named, _AT_ONCE)):
            wanted = [chunk for chunk in some if chunk is not None and self._catalogue.origin(chunk.id) not in kept]
            self.delete(wanted)
            gone += [chunk.id for chunk in wanted]
        return gone
