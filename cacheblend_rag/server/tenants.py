"""Opens what each tenant of a server has: a namespace, named as the tenant is, and in it a client and a catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from cacheblend_rag.server.calling import PerNamespace, Served
from cacheblend_rag.server.catalogue import ChunkCatalogue
from cacheblend_rag.server.quotas import NO_QUOTA, Quota
from cacheblend_rag.store.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from cacheblend_rag.engines.vllm.client import BlendClient


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
            quota = quotas.get(name, NO_QUOTA)
            if quota.max_chunks is None:
                quota = replace(quota, max_chunks=max_chunks)
            catalogue = ChunkCatalogue(directory, own.registry, client.fingerprint, name, quota)
            made[name] = Served(own, catalogue)
        for name, tenant in chosen.items():
            made[name].catalogue.read([made[lender].catalogue for lender in tenant.reads])
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

    async def drain(self) -> None:
        """Wait for what finished answers have started, of all tenants."""
        await asyncio.gather(*(served.client.drain() for served in self.each.values()))

    def close(self) -> None:
        """Close all files."""
        for served in self.each.values():
            served.catalogue.stop()
        for served in self.each.values():
            served.catalogue.close()
