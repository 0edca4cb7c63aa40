"""Tells who asks, and holds what each tenant of a server has: a namespace, named as it is, with a client and a catalogue."""

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
    """Says whose key a request carries, and what it is counted as.

    Attributes:
        namespace: Name of the one that its key is for.
        operator: Whether it may see what is not in one namespace: all of the store, the metrics.
        admission: The requests with such keys, and what they use.
        sequences: How many answers it is counted as.
        chats: How many chats of a batch have been rendered.
        unpaid: How many tokens of its prompts are still to be charged, where beams read them again and again; else None.
    """

    namespace: str = DEFAULT_NAME
    operator: bool = True
    admission: Admission = field(default_factory=Admission)
    sequences: int = 0
    chats: int = 0
    unpaid: int | None = None

    def count(self, sequences: int) -> tuple[str, int] | None:
        """Count it as so many answers from now on, unless it is already; else see :meth:`Admission.refusal`."""
        more = sequences - self.sequences
        if more <= 0:
            return None
        refusal = self.admission.refusal(more)
        if refusal is None:
            self.admission.serving += more
            self.sequences = sequences
        return refusal

    def end(self) -> None:
        """Count it no more, however it ended."""
        self.admission.serving -= self.sequences
        self.sequences = 0

    def charge_prompt(self, tokens: int) -> None:
        """Charge what computing a prompt costs."""
        if self.unpaid is not None:
            tokens = min(tokens, self.unpaid)
            self.unpaid -= tokens
        self.admission.charge(tokens)


calling: ContextVar[Caller] = ContextVar("cacheblend_caller")
"""Of the request at hand; set where its key is checked, never by what a client sends. It has no default: code that runs for no
request has no namespace, and fails rather than taking another one's."""


@dataclass(frozen=True)
class Served:
    """Holds what a server has within one namespace.

    Attributes:
        client: Blends there.
        catalogue: Its chunks.
        reading: Held while a registration is read and tokenised.
        looking: Held while chunks are listed, looked at or deleted.
        registering: The requests that store chunks, of which what is not registered in the end must be deleted again.
        cut_short: Chunks of requests that the engine's end has cut short; workers may still write their KV.
    """

    client: BlendClient
    catalogue: ChunkCatalogue
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    registering: set[asyncio.Task[Any]] = field(default_factory=set)
    cut_short: list[Chunk] = field(default_factory=list)

    @cached_property
    def chunks(self) -> ServedChunks:
        """Return its chunks together with their KV."""
        return ServedChunks(self.client, self.catalogue)


class PerNamespace(Generic[T]):
    """Holds something that each namespace has one of, by the namespaces' names."""

    def __init__(self, each: Mapping[str, T]):
        self.each = dict(each)

    @property
    def current(self) -> T:
        """Return the one of the request at hand.

        Raises:
            LookupError: No request is being served.
        """
        return self.each[calling.get().namespace]

    @property
    def alone(self) -> bool:
        """Return whether there is only one."""
        return len(self.each) == 1


class StandIn:
    """Has the attributes of the current one of several objects, so that vLLM's handlers can be given one for all."""

    def __init__(self, objects: PerNamespace[Any]):
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects.current, name)


class ServedTenants(PerNamespace[Served]):
    """Holds all tenants of a server."""

    @classmethod
    def open(
        cls,
        client: BlendClient,
        directory: Path | None,
        tenants: Iterable[Namespace],
        max_chunks: int,
        quotas: Mapping[str, Quota] = MappingProxyType({}),
    ) -> ServedTenants:
        """Open each tenant's chunks in the store ``directory`` (None keeps nothing); ``client`` is the default tenant's.

        The ``tenants`` are each there once, and with them those that they read. One whose quota, by its name, says nothing of it
        may register ``max_chunks``.

        Raises:
            StoreError: A file there cannot be used.
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

    @property
    def known(self) -> int:
        """Return how many chunks are known, of all tenants together."""
        return sum(len(served.client.registry) for served in self.each.values())

    @property
    def warnings(self) -> list[str]:
        """Return what the operator should know."""
        return [warning for served in self.each.values() for warning in served.catalogue.warnings]

    def watch(self) -> None:
        """See :meth:`ChunkCatalogue.watch`; what has expired goes from then on."""
        for served in self.each.values():
            served.catalogue.watch(served.chunks.expire)

    async def settle(self, workers: Sequence[Process], within_s: float) -> None:
        """Delete what registrations had stored that the engine's end has cut short, once its ``workers`` have ended."""
        running = [task for served in self.each.values() for task in served.registering]
        if running:
            await asyncio.wait(running, timeout=within_s)
        if cut_short := [served for served in self.each.values() if served.cut_short]:
            # A worker writes all that it has computed before it ends.
            await asyncio.to_thread(psutil.wait_procs, workers, timeout=within_s)
            for served in cut_short:
                await asyncio.to_thread(served.chunks.settle, served.cut_short)

    async def drain(self) -> None:
        """Wait for what finished answers have started, of all tenants."""
        await asyncio.gather(*(served.client.drain() for served in self.each.values()))

    def close(self) -> None:
        """Close all files."""
        for served in self.each.values():
            served.catalogue.stop()
        for served in self.each.values():
            served.catalogue.close()
