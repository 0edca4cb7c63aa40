"""Tells who asks, and what of the server is theirs: every tenant has a client and a catalogue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cacheblend_rag.server.catalogue import ChunkCatalogue
from cacheblend_rag.server.chunks import ServedChunks
from cacheblend_rag.server.quotas import Admission, Quota
from cacheblend_rag.store.namespace import DEFAULT_NAME, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from cacheblend_rag.engines.vllm.client import BlendClient

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """Says whose key a request carries.

    Attributes:
        tenant: The key's tenant.
        operator: Whether it may see what is not one tenant's: all of the store, the metrics.
        admission: Its tenant's requests, and what they use.
    """

    tenant: str = DEFAULT_NAME
    operator: bool = True
    admission: Admission = field(default_factory=Admission)


calling: ContextVar[Caller] = ContextVar("cacheblend_caller")
"""Of the request at hand; set where its key is checked, never by what a client sends. It has no default: code that runs for no
request has no tenant, and fails rather than taking another one's."""


@dataclass(frozen=True)
class Served:
    """One tenant's part of the server.

    Attributes:
        client: Blends for it.
        catalogue: Its chunks.
        reading: Held while a registration is read and tokenised.
    """

    client: BlendClient
    catalogue: ChunkCatalogue
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def chunks(self) -> ServedChunks:
        """Return its chunks together with their KV."""
        return ServedChunks(self.client, self.catalogue)


class ByTenant(Generic[T]):
    """Something that each tenant has one of.

    Attributes:
        each: All of them, by the tenants' names.
    """

    def __init__(self, each: Mapping[str, T]):
        """Hold ``each``."""
        self.each = dict(each)

    @property
    def current(self) -> T:
        """Return the one of the tenant whose request this is.

        Raises:
            LookupError: No request is being served.
        """
        return self.each[calling.get().tenant]


class StandIn:
    """Has the attributes of the current tenant's one of several objects, so that vLLM's handlers can be given one for all."""

    def __init__(self, objects: ByTenant[Any]):
        """Stand in for ``objects``."""
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects.current, name)


class ServedTenants(ByTenant[Served]):
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
        """Open each tenant's chunks in ``directory``.

        Args:
            client: The default tenant's.
            directory: The store directory; None keeps nothing.
            tenants: Each once, and with them those that they read.
            max_chunks: How many chunks a tenant may register whose quota says nothing of it.
            quotas: By the tenants' names.

        Raises:
            StoreError: A file there cannot be used.
        """
        chosen = {tenant.name: tenant for tenant in tenants}
        made: dict[str, Served] = {}
        for name, tenant in chosen.items():
            own = client if tenant == client.namespace else client.of(tenant)
            quota = quotas.get(name, Quota())
            most = max_chunks if quota.max_chunks is None else quota.max_chunks
            catalogue = ChunkCatalogue(
                directory, own.registry, client.fingerprint, most, name, quota.max_kv, quota.expire_after_s
            )
            made[name] = Served(own, catalogue)
        for name, tenant in chosen.items():
            made[name].catalogue.read([made[lender].catalogue for lender in tenant.reads])
        return cls(made)

    @property
    def alone(self) -> bool:
        """Return whether there is only one tenant."""
        return len(self.each) == 1

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

    async def drain(self) -> None:
        """Wait for what finished answers have started, of all tenants."""
        await asyncio.gather(*(served.client.drain() for served in self.each.values()))

    def close(self) -> None:
        """Close all files."""
        for served in self.each.values():
            served.catalogue.stop()
        for served in self.each.values():
            served.catalogue.close()
