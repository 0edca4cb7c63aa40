"""Identifies the caller of a request, and holds each tenant's client and catalogue, in a namespace of the tenant's name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psutil

from cacheblend_rag.server.catalogue import ChunkCatalogue
from cacheblend_rag.server.chunks import ServedChunks
from cacheblend_rag.server.keys import NO_QUOTA, Admission, Quota
from cacheblend_rag.store.files import DEFAULT_NAME, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from psutil import Process

    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.prompts.chunk import Chunk

T = TypeVar("T")


@dataclass
class Caller:
    """Identifies the tenant of a request's key, and counts the request's answers and tokens.

    Attributes:
        namespace: Name of the namespace of the request's key.
        operator: Whether the caller may see data of all namespaces: the whole store, the metrics.
        admission: Counters of all requests of the tenant.
        sequences: Number of answers that the request counts as.
        chats: Number of chats of a batch that have been rendered.
        unpaid: Prompt tokens still to be charged, if beam search reads the prompts repeatedly; else None.
    """

    namespace: str = DEFAULT_NAME
    operator: bool = True
    admission: Admission = field(default_factory=Admission)
    sequences: int = 0
    chats: int = 0
    unpaid: int | None = None

    def count(self, sequences: int) -> tuple[str, int] | None:
        """Count the request as at least ``sequences`` answers; returns the refusal of :meth:`Admission.refusal`, if any."""
        more = sequences - self.sequences
        if more <= 0:
            return None
        refusal = self.admission.refusal(more)
        if refusal is None:
            self.admission.serving += more
            self.sequences = sequences
        return refusal

    def end(self) -> None:
        """Stop counting the request's answers."""
        self.admission.serving -= self.sequences
        self.sequences = 0

    def charge_prompt(self, tokens: int) -> None:
        """Charge the tokens of a computed prompt, at most ``unpaid`` if set."""
        if self.unpaid is not None:
            tokens = min(tokens, self.unpaid)
            self.unpaid -= tokens
        self.admission.charge(tokens)


calling: ContextVar[Caller] = ContextVar("cacheblend_caller")
"""Caller of the current request, set where the key is checked, never from client input. The variable has no default: code outside
a request has no namespace, and fails instead of using another namespace."""


@dataclass(frozen=True)
class Served:
    """Holds a server's state within one namespace.

    Attributes:
        client: Blends within the namespace.
        catalogue: Chunks of the namespace.
        reading: Lock held while a registration is read and tokenised.
        looking: Lock held while chunks are listed, inspected or deleted.
        registering: Running requests that store chunks; KV of chunks that do not get registered must be deleted.
        cut_short: Chunks of requests that the engine's end has interrupted; workers may still write their KV.
    """

    client: BlendClient
    catalogue: ChunkCatalogue
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    registering: set[asyncio.Task[Any]] = field(default_factory=set)
    cut_short: list[Chunk] = field(default_factory=list)

    @cached_property
    def chunks(self) -> ServedChunks:
        """Return the namespace's chunks together with their KV."""
        return ServedChunks(self.client, self.catalogue)


class PerNamespace(Generic[T]):
    """Holds one object for each namespace, by the namespace's name."""

    def __init__(self, each: Mapping[str, T]):
        self.each = dict(each)

    @property
    def current(self) -> T:
        """Return the object of the current request's namespace.

        Raises:
            LookupError: No request is being served.
        """
        return self.each[calling.get().namespace]


class StandIn:
    """Delegates attributes to the object of the current namespace, so that vLLM's handlers need only one object."""

    def __init__(self, objects: PerNamespace[Any]):
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects.current, name)


class ServedTenants(PerNamespace[Served]):
    """Holds the state of all tenants of a server."""

    @classmethod
    def open(
        cls,
        client: BlendClient,
        directory: Path | None,
        tenants: Iterable[Namespace],
        max_chunks: int,
        quotas: Mapping[str, Quota] = MappingProxyType({}),
    ) -> ServedTenants:
        """Open each tenant's chunks in the store ``directory`` (None stores nothing); ``client`` is the default tenant's.

        The ``tenants`` must contain each tenant once, including every tenant that others read. ``max_chunks`` limits the chunks
        of a tenant whose quota in ``quotas`` does not.

        Raises:
            StoreError: A file in the directory cannot be used.
        """
        chosen = {tenant.name: tenant for tenant in tenants}
        made: dict[str, Served] = {}
        for name, tenant in chosen.items():
            own = client if tenant == client.namespace else client.of(tenant)
            quota = quotas.get(name, NO_QUOTA)
            if quota.max_chunks is None:
                quota = replace(quota, max_chunks=max_chunks)
            catalogue = ChunkCatalogue(
                directory, own.registry, client.fingerprint, name, quota, writer=own.entries.writer
            )
            made[name] = Served(own, catalogue)
        for name, tenant in chosen.items():
            lenders = [made[lender] for lender in tenant.reads]
            made[name].catalogue.read([lender.catalogue for lender in lenders])
            for lender in lenders:
                lender.chunks.lend_to(made[name].chunks)
        return cls(made)

    def watch(self) -> None:
        """Start watching as :meth:`ChunkCatalogue.watch` does, and deleting expired chunks."""
        for served in self.each.values():
            served.catalogue.watch(served.chunks.expire)

    async def settle(self, workers: Sequence[Process], within_s: float) -> None:
        """Delete the KV of registrations that the engine's end has interrupted, once the ``workers`` have ended."""
        running = [task for served in self.each.values() for task in served.registering]
        if running:
            await asyncio.wait(running, timeout=within_s)
        if cut_short := [served for served in self.each.values() if served.cut_short]:
            # A worker writes all computed KV before it ends.
            await asyncio.to_thread(psutil.wait_procs, workers, timeout=within_s)
            for served in cut_short:
                await asyncio.to_thread(served.chunks.settle, served.cut_short)

    async def drain(self) -> None:
        """Wait for the background work that finished answers of all tenants have started."""
        await asyncio.gather(*(served.client.drain() for served in self.each.values()))

    def close(self) -> None:
        """Close all files."""
        for served in self.each.values():
            served.catalogue.stop()
        for served in self.each.values():
            served.catalogue.close()
