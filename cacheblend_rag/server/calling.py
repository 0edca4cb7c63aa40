"""Tells who asks, and what of the server a request is given: each namespace has a client and a catalogue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cacheblend_rag.server.catalogue import ChunkCatalogue
from cacheblend_rag.server.chunks import ServedChunks
from cacheblend_rag.server.quotas import Admission
from cacheblend_rag.store.namespace import DEFAULT_NAME

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.client import BlendClient

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """Says whose key a request carries.

    Attributes:
        namespace: Name of the one that its key is for.
        operator: Whether it may see what is not in one namespace: all of the store, the metrics.
        admission: The requests with such keys, and what they use.
    """

    namespace: str = DEFAULT_NAME
    operator: bool = True
    admission: Admission = field(default_factory=Admission)


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
    """

    client: BlendClient
    catalogue: ChunkCatalogue
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def chunks(self) -> ServedChunks:
        """Return its chunks together with their KV."""
        return ServedChunks(self.client, self.catalogue)


class PerNamespace(Generic[T]):
    """Holds something that each namespace has one of.

    Attributes:
        each: All of them, by the namespaces' names.
    """

    def __init__(self, each: Mapping[str, T]):
        """Hold ``each``."""
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
        """Stand in for ``objects``."""
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects.current, name)
